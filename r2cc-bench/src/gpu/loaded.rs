//! Which libraries a process has really mapped: `/proc/PID/maps`, not what was asked for.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// Files that `pid` has mapped for execution, each once, in order of address.
///
/// # Errors
/// If the process is gone or another user's.
pub fn mapped(pid: u32) -> io::Result<Vec<PathBuf>> {
    Ok(files(&fs::read_to_string(format!("/proc/{pid}/maps"))?))
}

/// The first mapped file of this process whose name begins with `name`.
pub fn mapped_here(name: &str) -> Option<PathBuf> {
    mapped(std::process::id()).ok()?.into_iter().find(|path| begins(path, name))
}

/// Whether the file's own name begins with `name`.
pub fn begins(path: &Path, name: &str) -> bool {
    path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name))
}

fn files(maps: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for line in maps.lines() {
        // address perms offset dev inode path, and the path may hold blanks
        let mut fields = line.splitn(6, char::is_whitespace);
        let executable = fields.nth(1).is_some_and(|perms| perms.contains('x'));
        let path = fields.nth(3).map(str::trim_start).filter(|path| path.starts_with('/'));
        if let Some(path) = path.map(PathBuf::from).filter(|path| executable && !found.contains(path)) {
            found.push(path);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executable_files_count_and_each_once() {
        let maps = "55d0-55d1 r--p 00000000 fe:00 12 /usr/lib/libcuda.so.1\n\
                    55d1-55d2 r-xp 00001000 fe:00 12                 /usr/lib/libcuda.so.1\n\
                    55d2-55d3 r-xp 00001000 fe:00 13                 /opt/with blank/libnccl.so.2\n\
                    55d3-55d4 r-xp 00001000 fe:00 12                 /usr/lib/libcuda.so.1\n\
                    7ffd-7ffe r-xp 00000000 00:00 0                  [vdso]\n";
        let expected = ["/usr/lib/libcuda.so.1", "/opt/with blank/libnccl.so.2"].map(PathBuf::from);
        assert_eq!(files(maps), expected);
        assert!(begins(&expected[1], "libnccl.so") && !begins(&expected[1], "libcuda"));
    }

    #[test]
    fn this_process_has_its_own_executable_mapped() {
        let own = std::env::current_exe().unwrap();
        assert!(mapped(std::process::id()).unwrap().contains(&own));
    }
}
