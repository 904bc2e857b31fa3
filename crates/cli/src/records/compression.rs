//! Compressed records, recognised by their first bytes, and compressed copies of records.

use std::io::{self, BufRead, BufReader, Cursor, Read};

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// The text of gzip or zstd data with any number of members; anything else unchanged. Memory is bounded by zstd's
/// window of at most 128 MiB; a file of a larger one is an error.
pub(crate) fn decompressed(mut input: impl BufRead + 'static) -> io::Result<Box<dyn BufRead>> {
    let mut head = Vec::new();
    // One byte at a time, so that input typed into a terminal isn't waited for longer than needed.
    while [GZIP, ZSTD].iter().any(|magic| head.len() < magic.len() && magic.starts_with(&head)) {
        if input.by_ref().take(1).read_to_end(&mut head)? == 0 {
            break;
        }
    }
    let (is_gzip, is_zstd) = (head == GZIP, head == ZSTD);
    let input = BufReader::new(Cursor::new(head).chain(input));
    match (is_gzip, is_zstd) {
        (true, _) => codec::gzip(input),
        (_, true) => codec::zstd(input),
        _ => Ok(Box::new(input)),
    }
}

pub(crate) use codec::{Copy, copy, finished};

#[cfg(feature = "compression")]
mod codec {
    use std::io::{self, BufRead, BufReader, Read, Write};

    use flate2::bufread::MultiGzDecoder;
    use zstd::stream::read::Decoder;
    use zstd::stream::write::Encoder;

    /// Compresses what is written to it.
    pub(crate) type Copy<W> = Encoder<'static, W>;

    pub(crate) fn copy<W: Write>(to: W) -> io::Result<Copy<W>> {
        Encoder::new(to, 1)
    }

    pub(crate) fn finished<W: Write>(copy: Copy<W>) -> io::Result<W> {
        copy.finish()
    }

    pub(super) fn gzip(input: impl BufRead + 'static) -> io::Result<Box<dyn BufRead>> {
        Ok(Box::new(BufReader::new(Whole(MultiGzDecoder::new(input), "gzip"))))
    }

    pub(super) fn zstd(input: impl BufRead + 'static) -> io::Result<Box<dyn BufRead>> {
        Ok(Box::new(BufReader::new(Whole(Decoder::with_buffer(input)?, "zstd"))))
    }

    /// Names the compression in the errors of its decoder.
    struct Whole<R>(R, &'static str);

    impl<R: Read> Read for Whole<R> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.0.read(into).map_err(|error| match error.kind() {
                io::ErrorKind::Interrupted => error,
                io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), format!("the {} data is cut off", self.1)),
                _ => io::Error::other(format!("the {} data can't be read: {error}", self.1)),
            })
        }
    }
}

#[cfg(not(feature = "compression"))]
mod codec {
    use std::io::{self, BufRead};

    use crate::version::lacking;

    /// As it is.
    pub(crate) type Copy<W> = W;

    pub(crate) fn copy<W>(to: W) -> io::Result<Copy<W>> {
        Ok(to)
    }

    pub(crate) fn finished<W>(copy: Copy<W>) -> io::Result<W> {
        Ok(copy)
    }

    pub(super) fn gzip(_: impl BufRead) -> io::Result<Box<dyn BufRead>> {
        Err(io::Error::other(lacking("gzip", "compression")))
    }

    pub(super) fn zstd(_: impl BufRead) -> io::Result<Box<dyn BufRead>> {
        Err(io::Error::other(lacking("zstd", "compression")))
    }
}

#[cfg(all(test, feature = "compression"))]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    /// With a checksum, as the program of this name writes it.
    fn zstd(text: &[u8]) -> Vec<u8> {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.include_checksum(true).unwrap();
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn read(bytes: Vec<u8>) -> Result<Vec<u8>, String> {
        let mut text = Vec::new();
        let mut input = decompressed(Cursor::new(bytes)).map_err(|error| error.to_string())?;
        input.read_to_end(&mut text).map(|_| text).map_err(|error| error.to_string())
    }

    #[test]
    fn text_is_read_however_it_is_compressed() {
        let text = "a line\n".repeat(50_000).into_bytes();
        for compress in [gzip, zstd, <[u8]>::to_vec] {
            assert!(read(compress(&text)).unwrap() == text);
            // As rotated logs are appended to one another.
            assert!(read([compress(b"x"), compress(&text)].concat()).unwrap() == [b"x", &text[..]].concat());
        }
        for short in [&b""[..], b"\x1f", b"\x28\xb5", b"{", b"(x"] {
            assert_eq!(read(short.to_vec()).unwrap(), short);
        }
    }

    #[test]
    fn data_that_is_cut_off_or_damaged_is_an_error_after_what_can_be_read() {
        let text: Vec<_> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        for (compress, name) in [(gzip as fn(&[u8]) -> Vec<u8>, "gzip"), (zstd, "zstd")] {
            let whole = compress(&text);
            for left in [whole.len() - 1, whole.len() / 2, 10] {
                assert_eq!(read(whole[..left].to_vec()), Err(format!("the {name} data is cut off")), "{left}");
            }
            let mut damaged = whole.clone();
            damaged[whole.len() / 2] ^= 0xff;
            damaged[whole.len() / 2 + 1] ^= 0xff;
            assert!(read(damaged).is_err_and(|why| why.contains(name)), "{name}");
        }
    }
}
