//! A directory as the store of archives. What is made in it is for its owner alone, whatever the umask.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;

/// A directory that exists. Files and folders are named relative to it, with `/`. Each call blocks.
///
/// A symbolic link below it is refused: if two months were one folder, deleting one would delete the other.
#[derive(Clone, Debug)]
pub(super) struct Directory(PathBuf);

/// What a folder has under a name.
#[derive(Debug)]
pub(super) struct FileEntry {
    pub(super) name: String,
    /// For a symbolic link, that of the link itself.
    pub(super) metadata: Metadata,
}

impl Directory {
    pub(super) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// What is in a folder, in no order; nothing if there is no such folder. Names that aren't UTF-8 are somebody
    /// else's, and left out.
    pub(super) fn list(&self, folder: &str) -> Result<Vec<FileEntry>> {
        let entries = match std::fs::read_dir(self.place(folder)?) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            match entry.metadata() {
                Ok(metadata) => found.push(FileEntry { name, metadata }),
                // Deleted meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// The bytes of a file. As on S3, a folder isn't one.
    pub(super) fn size(&self, file: &str) -> Result<u64> {
        let metadata = self.place(file)?.symlink_metadata()?;
        match metadata.is_dir() {
            true => Err(ErrorKind::NotFound.into()),
            // Opening a pipe would wait until somebody writes to it.
            false if !metadata.is_file() => Err(Error::other("not a regular file")),
            false => Ok(metadata.len()),
        }
    }

    /// A range of a file; an error if the file is too short for it.
    pub(super) fn read(&self, file: &str, range: Range<u64>) -> Result<Bytes> {
        self.size(file)?;
        let mut open = File::open(self.place(file)?)?;
        open.seek(SeekFrom::Start(range.start))?;
        let length = range.end.saturating_sub(range.start);
        let mut bytes = Vec::new();
        open.take(length).read_to_end(&mut bytes)?;
        if bytes.len() as u64 == length { Ok(bytes.into()) } else { Err(ErrorKind::UnexpectedEof.into()) }
    }

    /// Writes a file that doesn't exist yet, and the folders above it; flushes all of that to disk. The file appears
    /// when it is complete. Until then it is `NAME#1`.
    pub(super) fn create(&self, file: &str, bytes: &[u8]) -> Result<()> {
        let path = self.place(file)?;
        for (at, _) in file.match_indices('/') {
            self.make_folder(&file[..at])?;
        }
        let (unfinished, mut open) = unfinished(&path)?;
        let written = open.write_all(bytes).and_then(|()| open.sync_all());
        drop(open);
        // Unlike renaming, linking never replaces an existing file.
        let linked = written.and_then(|()| std::fs::hard_link(&unfinished, &path));
        // If it stays, the next run removes it.
        let _ = std::fs::remove_file(&unfinished);
        linked?;
        path.parent().map_or(Ok(()), sync)
    }

    fn make_folder(&self, folder: &str) -> Result<()> {
        let path = self.0.join(folder);
        let mut builder = DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        match builder.create(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
            made => made?,
        }
        // The umask may have taken rights from the owner.
        #[cfg(unix)]
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
        path.parent().map_or(Ok(()), sync)
    }

    pub(super) fn delete(&self, file: &str) -> Result<()> {
        std::fs::remove_file(self.place(file)?)
    }

    /// Flushes to disk the names in a folder and in those above it.
    pub(super) fn sync(&self, folder: &str) -> Result<()> {
        let path = self.place(folder)?;
        path.ancestors().take_while(|path| path.starts_with(&self.0)).try_for_each(sync)
    }

    /// The path of a file or folder, unless a symbolic link is on the way.
    fn place(&self, name: &str) -> Result<PathBuf> {
        let mut path = self.0.clone();
        for word in name.split('/') {
            path.push(word);
            match path.symlink_metadata() {
                Ok(found) if found.is_symlink() => {
                    return Err(Error::other(format!("{word} is a symbolic link, which an archive can't contain")));
                }
                // An error is returned by the operation that uses the path.
                _ => {}
            }
        }
        Ok(path)
    }
}

/// A new file beside this one, for its owner alone.
fn unfinished(path: &Path) -> Result<(PathBuf, File)> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    for number in 1_u32.. {
        let mut name = path.as_os_str().to_owned();
        name.push(format!("#{number}"));
        let unfinished = PathBuf::from(name);
        match options.open(&unfinished) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            open => {
                let open = open?;
                #[cfg(unix)]
                open.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
                return Ok((unfinished, open));
            }
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

fn sync(folder: &Path) -> Result<()> {
    File::open(folder)?.sync_all()
}
