//! `--archive FILE.tar.zst`: results folders in one file, to attach to a report of a defect.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Compression level: a record shrinks tenfold at this one already.
const LEVEL: i32 = 9;

/// Why there is no archive.
#[derive(Debug, Error)]
#[error("{}: cannot be written: {source}\n  hint: give another --archive", file.display())]
pub struct ArchiveError {
    file: PathBuf,
    source: io::Error,
}

/// An archive that is known to be writable, and is there only once it is whole.
pub struct Archive {
    file: PathBuf,
    partial: PathBuf,
    packer: tar::Builder<zstd::Encoder<'static, File>>,
}

impl std::fmt::Debug for Archive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Archive").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Archive {
    /// Starts an archive that [`Archive::finish`] will put at `file`.
    ///
    /// # Errors
    /// If nothing can be written there.
    pub fn create(file: &Path) -> Result<Self, ArchiveError> {
        let failed = |source| ArchiveError { file: file.to_owned(), source };
        let name = file.file_name().ok_or_else(|| failed(io::Error::other("this names no file")))?;
        if file.is_dir() {
            return Err(failed(io::ErrorKind::IsADirectory.into()));
        }
        let partial = file.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
        let encoder = File::create(&partial).and_then(|file| zstd::Encoder::new(file, LEVEL)).map_err(failed)?;
        Ok(Self { file: file.to_owned(), partial, packer: tar::Builder::new(encoder) })
    }

    /// Adds the plain files of a results folder under the folder's own name.
    ///
    /// # Errors
    /// If one cannot be read or written.
    pub fn add(&mut self, folder: &Path) -> Result<(), ArchiveError> {
        let name = folder.canonicalize().ok().and_then(|path| path.file_name().map(PathBuf::from));
        let name = name.unwrap_or_else(|| "results".into());
        let mut pack = || -> io::Result<()> {
            let mut files: Vec<PathBuf> =
                fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
            files.sort();
            // Hidden files are locks and halves.
            let hidden = |file: &Path| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
            for file in files.iter().filter(|file| file.is_file() && !hidden(file)) {
                self.packer.append_path_with_name(file, name.join(file.file_name().unwrap_or_default()))?;
            }
            Ok(())
        };
        pack().map_err(|source| ArchiveError { file: self.file.clone(), source })
    }

    /// Closes the archive and puts it in its place.
    ///
    /// # Errors
    /// If the rest cannot be written.
    pub fn finish(mut self) -> Result<(), ArchiveError> {
        let written = self.packer.finish().and_then(|()| self.packer.get_mut().do_finish());
        let synced = written.and_then(|()| self.packer.get_mut().get_mut().sync_all());
        synced
            .and_then(|()| fs::rename(&self.partial, &self.file))
            .map_err(|source| ArchiveError { file: self.file.clone(), source })
    }
}

impl Drop for Archive {
    fn drop(&mut self) {
        // After `finish` it is not there any more.
        let _ = fs::remove_file(&self.partial);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use super::*;

    #[test]
    fn an_archive_holds_the_files_of_each_folder_and_no_locks() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("all.tar.zst");
        let mut archive = Archive::create(&file).unwrap();
        for name in ["one", "two"] {
            let folder = place.path().join(name);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("summary.json"), name).unwrap();
            fs::write(folder.join(".lock"), "").unwrap();
            archive.add(&folder).unwrap();
        }
        assert!(!file.exists(), "not before it is whole");
        archive.finish().unwrap();
        let mut held = BTreeMap::new();
        for entry in tar::Archive::new(zstd::Decoder::new(File::open(&file).unwrap()).unwrap()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            held.insert(entry.path().unwrap().display().to_string(), text);
        }
        let expected = [("one/summary.json", "one"), ("two/summary.json", "two")];
        assert_eq!(held, expected.map(|(name, text)| (name.to_owned(), text.to_owned())).into());
    }

    #[test]
    fn an_archive_that_cannot_be_or_was_given_up_leaves_nothing() {
        let place = tempfile::tempdir().unwrap();
        let error = Archive::create(&place.path().join("no/where.tar.zst")).unwrap_err();
        assert!(error.to_string().contains("where.tar.zst: cannot be written"), "{error}");
        assert!(Archive::create(place.path()).is_err(), "a folder is in the way");
        drop(Archive::create(&place.path().join("half.tar.zst")).unwrap());
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }
}
