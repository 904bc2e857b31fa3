//! The attributes of a request that are compared as given, each by its name.

/// How many most requests have at most.
const FEW: usize = 4;

/// Values by name. The first few allocate nothing.
///
/// Not a `SmallVec`, which keeps whatever it borrows borrowed for as long as it lives: then a request with attributes
/// could only be used by who may borrow them for as long.
#[derive(Clone, Debug, Default)]
pub(super) struct NamedValues<'a> {
    first: [Option<NamedValue<'a>>; FEW],
    more: Vec<NamedValue<'a>>,
}

type NamedValue<'a> = (&'a str, &'a [u8]);

impl<'a> NamedValues<'a> {
    /// Sets the value of this name, in place of an earlier one.
    pub(super) fn set(&mut self, name: &'a str, value: &'a [u8]) {
        let mut known = self.first.iter_mut().flatten().chain(&mut self.more);
        if let Some(known) = known.find(|(other, _)| *other == name) {
            known.1 = value;
        } else if let Some(free) = self.first.iter_mut().find(|place| place.is_none()) {
            *free = Some((name, value));
        } else {
            self.more.push((name, value));
        }
    }

    /// Forgets the values of these names.
    pub(super) fn remove(&mut self, names: &[&str]) {
        for place in &mut self.first {
            *place = place.filter(|(name, _)| !names.contains(name));
        }
        self.more.retain(|(name, _)| !names.contains(name));
    }

    /// The value of this name.
    pub(super) fn get(&self, name: &str) -> Option<&'a [u8]> {
        self.iter().find(|(other, _)| *other == name).map(|(_, value)| value)
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = NamedValue<'a>> {
        self.first.iter().flatten().chain(&self.more).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_has_the_value_that_was_set_last() {
        let names: Vec<_> = (0..9).map(|at| format!("name{at}")).collect();
        let mut values = NamedValues::default();
        for value in ["early", "late"] {
            names.iter().for_each(|name| values.set(name, value.as_bytes()));
        }
        assert_eq!(values.iter().count(), names.len());
        values.remove(&["name1", "name7", "name9"]);
        let left: Vec<_> = values.iter().map(|(name, _)| name).collect();
        assert_eq!(left, ["name0", "name2", "name3", "name4", "name5", "name6", "name8"]);
        assert_eq!((values.get("name8"), values.get("name1")), (Some(&b"late"[..]), None));
        values.set("name1", b"again");
        assert_eq!(values.iter().filter(|(name, _)| *name == "name1").count(), 1);
    }

    /// Attributes of a long life are attributes of a short one.
    #[test]
    fn what_they_borrow_may_be_borrowed_for_longer_than_they_are_used() {
        fn shorter<'s>(values: &'s NamedValues<'static>) -> &'s NamedValues<'s> {
            values
        }
        let mut values = NamedValues::default();
        values.set("name", b"value");
        assert_eq!(shorter(&values).get("name"), Some(&b"value"[..]));
    }
}
