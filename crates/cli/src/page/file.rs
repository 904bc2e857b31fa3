//! The option `--report`, and the file that it names.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::{Page, html};
use crate::version::lacking;

#[derive(Debug, Args)]
pub(crate) struct ReportFile {
    /// Also write a report to this file: an HTML page with plots and tables.
    #[arg(long = "report", value_name = "FILE", help_heading = "Output", hide = cfg!(not(feature = "reports")))]
    path: Option<PathBuf>,
}

/// A file to be written at the end. Its content is kept until then.
#[derive(Debug)]
pub(crate) struct Report {
    path: PathBuf,
}

impl ReportFile {
    /// Checks that the file can be written, before the work that would otherwise be lost. It must not be one of `read`,
    /// the files that are read.
    pub(crate) fn open(&self, read: &[Option<&Path>]) -> Result<Option<Report>> {
        let Some(path) = &self.path else { return Ok(None) };
        if cfg!(not(feature = "reports")) {
            bail!(lacking("--report", "reports"));
        }
        let shown = path.display();
        if path.as_os_str() == "-" {
            bail!("--report: expected a file to write, such as report.html, got {shown}");
        }
        if read.iter().flatten().any(|read| is_same(read, path)) {
            bail!("--report: expected a file other than the one that is read, got {shown}");
        }
        let why = || format!("--report: expected a file that can be written, got {shown}");
        // The reader of a pipe would take closing it for the end.
        let is_pipe = path.metadata().is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir());
        if !is_pipe {
            let target = path.canonicalize();
            let is_link = path.is_symlink();
            open(path).with_context(why)?;
            if target.is_err() {
                // The run may still fail or be killed.
                let made = if is_link { path.canonicalize().with_context(why)? } else { path.clone() };
                std::fs::remove_file(made).with_context(why)?;
            }
        }
        Ok(Some(Report { path: path.clone() }))
    }
}

impl Report {
    /// Replaces the content of the file.
    pub(crate) fn write(self, page: &Page) -> Result<()> {
        let text = html::page(page)?;
        let why = || format!("--report: {}", self.path.display());
        let whole = |path: &Path| open(path).and_then(|mut file| file.write_all(text.as_bytes()).and(file.flush()));
        // A pipe or a device can't be replaced.
        let Some(target) = self.path.canonicalize().ok().filter(|path| path.is_file()) else {
            return whole(&self.path).with_context(why);
        };
        // Written to a temporary file beside it first, so that a full disk keeps the old content.
        let folder = target.parent().unwrap_or(Path::new("."));
        let mut file = tempfile::NamedTempFile::new_in(folder).with_context(why)?;
        file.write_all(text.as_bytes()).and_then(|()| file.flush()).with_context(why)?;
        let permissions = target.metadata().with_context(why)?.permissions();
        file.as_file().set_permissions(permissions).with_context(why)?;
        file.persist(&target).map_err(|error| error.error).with_context(why)?;
        Ok(())
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).open(path)
}

fn is_same(one: &Path, other: &Path) -> bool {
    // Standard input may be a file too.
    let one = if one.as_os_str() == "-" { Path::new("/dev/stdin") } else { one };
    #[cfg(unix)]
    let identity = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        path.metadata().ok().map(|metadata| (metadata.dev(), metadata.ino()))
    };
    #[cfg(not(unix))]
    let identity = |path: &Path| path.canonicalize().ok();
    identity(one).is_some() && identity(one) == identity(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(path: PathBuf) -> ReportFile {
        ReportFile { path: Some(path) }
    }

    #[test]
    fn what_a_file_held_is_kept_until_there_is_a_page() {
        let folder = tempfile::tempdir().unwrap();
        let [old, new] = ["old.html", "new.html"].map(|name| folder.path().join(name));
        std::fs::write(&old, "x".repeat(1 << 20)).unwrap();
        for path in [&old, &new] {
            drop(report(path.clone()).open(&[]).unwrap());
        }
        assert_eq!(std::fs::read(&old).unwrap().len(), 1 << 20);
        assert!(!new.exists());
        let page = Page { title: "A title".into(), ..Page::default() };
        for path in [&old, &new] {
            report(path.clone()).open(&[]).unwrap().unwrap().write(&page).unwrap();
            assert!(std::fs::read_to_string(path).unwrap().ends_with("</html>\n"));
        }
    }

    #[test]
    fn a_file_that_is_read_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("access.log");
        std::fs::write(&log, "a log").unwrap();
        let error = report(folder.path().join(".").join("access.log")).open(&[Some(&log)]).unwrap_err();
        assert!(error.to_string().starts_with("--report: expected a file other"), "{error}");
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "a log");
        #[cfg(unix)]
        {
            let link = folder.path().join("link");
            std::fs::hard_link(&log, &link).unwrap();
            assert!(report(link).open(&[Some(&log)]).is_err(), "another name of the same file");
            let dangling = folder.path().join("dangling");
            std::os::unix::fs::symlink("target.html", &dangling).unwrap();
            drop(report(dangling.clone()).open(&[]).unwrap());
            assert!(dangling.is_symlink() && !folder.path().join("target.html").exists());
        }
        assert!(report(folder.path().join("-")).open(&[Some(&log)]).is_ok());
        assert!(report("-".into()).open(&[]).unwrap_err().to_string().contains("expected a file to write"));
    }
}
