//! How large the pages of a column are, before any is decompressed.
//!
//! The library decompresses a page into as many bytes as its header says, and no option limits that. A header is a
//! struct in Thrift's compact protocol: a field is a byte with its type and distance from the last id, and a value.

/// What a page's header says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageHeader {
    /// Bytes of the header itself.
    pub(super) length: usize,
    /// Bytes of the page that follow it.
    pub(super) stored: usize,
    /// Bytes of the page once it is decompressed.
    pub(super) decoded: usize,
}

/// The most levels of structs within structs: Parquet's page headers have three.
const DEEPEST: u32 = 8;

impl PageHeader {
    /// Parses the header that these bytes begin with; `None` if they don't.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let mut input = Input { bytes, at: 0 };
        let (mut header, mut id) = (Self::default(), 0);
        while let Some(kind) = input.field(&mut id)? {
            match (id, kind) {
                (2, 5) => header.decoded = input.size()?,
                (3, 5) => header.stored = input.size()?,
                _ => input.skip(kind, DEEPEST)?,
            }
        }
        Some(Self { length: input.at, ..header })
    }
}

struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    /// A number of 32 bits that isn't negative.
    fn size(&mut self) -> Option<usize> {
        let number = u32::try_from(self.number()?).ok()?;
        // The last bit is the sign.
        if number & 1 == 0 { usize::try_from(number >> 1).ok() } else { None }
    }

    /// The type of the next field, whose id is put into `id`; `Some(None)` at the end of the struct.
    fn field(&mut self, id: &mut u64) -> Option<Option<u8>> {
        let byte = self.byte()?;
        let (distance, kind) = (u64::from(byte >> 4), byte & 0xf);
        if kind == 0 {
            return Some(None);
        }
        *id = if distance == 0 { self.number()? / 2 } else { *id + distance };
        Some(Some(kind))
    }

    /// Skips a value of this type.
    fn skip(&mut self, kind: u8, depth: u32) -> Option<()> {
        match kind {
            // Booleans, whose value is the type.
            1 | 2 => {}
            3 => drop(self.byte()?),
            4..=6 => drop(self.number()?),
            7 => self.pass(8)?,
            8 => {
                let length = self.number()?;
                self.pass(length)?;
            }
            12 => {
                let (depth, mut id) = (depth.checked_sub(1)?, 0);
                while let Some(kind) = self.field(&mut id)? {
                    self.skip(kind, depth)?;
                }
            }
            // No page header has a list, a set or a map.
            _ => return None,
        }
        Some(())
    }

    fn pass(&mut self, length: u64) -> Option<()> {
        let rest = self.bytes.len() - self.at;
        let length = usize::try_from(length).ok().filter(|length| *length <= rest)?;
        self.at += length;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_anything_else_is_refused() {
        // Type 0; 300 bytes decoded, 5 stored; a struct of two numbers and of statistics with a binary; the end.
        let header = [0x15, 0, 0x15, 0xd8, 0x04, 0x15, 10, 0x2c, 0x15, 2, 0x15, 0, 0x3c, 0x18, 2, 7, 7, 0, 0, 0];
        let expected = PageHeader { length: header.len(), stored: 5, decoded: 300 };
        assert_eq!(PageHeader::read(&header), Some(expected));
        for length in 0..header.len() {
            assert_eq!(PageHeader::read(&header[..length]), None, "{length}");
        }
        let negative = [0x25, 0x01, 0];
        let endless = [0x1c; 100];
        let beyond = [0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 0];
        for wrong in [&negative[..], &endless, &beyond, &[0x19, 0x15, 0]] {
            assert_eq!(PageHeader::read(wrong), None, "{wrong:?}");
        }
    }
}
