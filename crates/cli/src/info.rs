//! What Redis reports about itself as lines: INFO, CLUSTER INFO, CONFIG GET.

use std::collections::BTreeMap;

/// Names and values.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fields(pub(crate) BTreeMap<String, String>);

impl Fields {
    /// From a list of alternating names and values.
    pub(crate) fn of_pairs(list: Vec<String>) -> Self {
        let (pairs, _) = list.as_chunks::<2>();
        Self(pairs.iter().map(|[name, value]| (name.clone(), value.clone())).collect())
    }

    /// From INFO's lines: `name:value`, and comments.
    pub(crate) fn of_info(text: &str) -> Self {
        let pairs = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(':'));
        Self(pairs.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect())
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_is_read_by_its_names() {
        let fields = Fields::of_info("# Server\r\nredis_version:7.0.15\r\n\r\nconfig_file:/a:b\r\nmaxclients:10\r\n");
        assert_eq!(fields.text("redis_version"), Some("7.0.15"));
        assert_eq!(fields.text("config_file"), Some("/a:b"));
        assert_eq!((fields.number("maxclients"), fields.number("redis_version")), (Some(10), None));
    }
}
