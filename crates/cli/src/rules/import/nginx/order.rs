//! The order of rules in which each place has its own limits, and no others.

use super::level::Place;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The limit, by its index in the list.
    Limit(usize),
    /// The end of the rules for requests of this place, by its index.
    End(usize),
}

/// An order of limits and ends that is right for every place, if there is one. The places go from the most specific to
/// the least, and each limit has the indexes of those where it is in force.
pub(super) fn steps(places: &[&Place], limits: &[Vec<usize>]) -> Option<Vec<Step>> {
    // Whether the patterns of a limit match requests of this place, where it isn't in force.
    let intrudes = |limit: &[usize], place: usize| {
        !limit.contains(&place) && limit.iter().any(|other| places[*other].covers(places[place]))
    };
    let ends: Vec<usize> = (0..places.len()).filter(|at| limits.iter().any(|limit| intrudes(limit, *at))).collect();
    let is_before = |one: Step, other: Step| match (one, other) {
        (Step::Limit(limit), Step::End(end)) => {
            limits[limit].iter().any(|own| places[end].covers(places[*own]) && *own <= end)
        }
        (Step::End(end), Step::Limit(limit)) => intrudes(&limits[limit], end),
        _ => false,
    };
    let mut left: Vec<Step> = (0..limits.len()).map(Step::Limit).chain(ends.into_iter().map(Step::End)).collect();
    let mut ordered = Vec::new();
    while !left.is_empty() {
        let free = left.iter().position(|one| !left.iter().any(|other| is_before(*other, *one)))?;
        ordered.push(left.remove(free));
    }
    Some(ordered)
}

/// The order if every limit is in force in only one place: place after place.
pub(super) fn apart(places: &[&Place], limits: &[Vec<usize>]) -> Vec<Step> {
    let mut ordered = Vec::new();
    for place in 0..places.len() {
        ordered.extend((0..limits.len()).filter(|limit| limits[*limit].contains(&place)).map(Step::Limit));
        if place + 1 < places.len() {
            ordered.push(Step::End(place));
        }
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;

    fn under(path: &str) -> Place {
        Place::Under(path.to_owned())
    }

    #[test]
    fn a_limit_comes_after_the_end_of_places_that_it_would_intrude_on() {
        let (inner, outer, other) = (under("/a/b"), under("/a"), under("/c"));
        let places = [&inner, &outer, &other];
        let (of_outer, of_inner_and_other) = (vec![1], vec![0, 2]);
        let ordered = steps(&places, &[of_outer, of_inner_and_other]).expect("an order");
        assert_eq!(ordered, [Step::Limit(1), Step::End(0), Step::Limit(0)]);
    }

    #[test]
    fn where_places_share_crosswise_there_is_no_order() {
        let places = [under("/a/b"), under("/c/d"), under("/a"), under("/c")];
        let places: Vec<_> = places.iter().collect();
        assert_eq!(steps(&places, &[vec![2, 1], vec![3, 0]]), None);
        let apart = apart(&places, &[vec![0], vec![1], vec![2], vec![3]]);
        assert_eq!(apart.len(), 7);
    }
}
