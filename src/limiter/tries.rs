//! The ids of a call that is made again until it is allowed. Each try has one of its own: what an earlier try took may
//! still be being given back, by its id.

use crate::request::Request;

/// Tries of a request whose id this process made. The tries of a request whose id this process made. Other requests
/// keep what they have in each try: no id, or the caller's.
pub(super) struct Tries<'a> {
    own_id: Option<&'a [u8]>,
    made: u32,
}

impl<'a> Tries<'a> {
    pub(super) fn of(request: &Request<'a>) -> Self {
        Self { own_id: request.plain().id.filter(|_| request.has_own_id()), made: 0 }
    }

    /// The id of the next try, in place of the request's; none for the first, which has the request's own.
    pub(super) fn next_id(&mut self) -> Option<Vec<u8>> {
        let own = self.own_id?;
        self.made += 1;
        (self.made > 1).then(|| [own, format!("-{}", self.made).as_bytes()].concat())
    }
}

impl<'a> Request<'a> {
    /// The same with the id of a try.
    pub(super) fn tried_by(self, id: &'a Option<Vec<u8>>) -> Self {
        match id {
            Some(id) => self.own_id(id),
            None => self,
        }
    }
}
