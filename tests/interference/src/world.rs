//! A scratch folder for one run: the folder that the operation names, what it may not touch, and the contents by which
//! files are recognised.

use nix::unistd::{Gid, Uid, chown};
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The second user, and a group that it shares with root's folders.
pub const OTHER: u32 = 64_301;
pub const GROUP: u32 = 64_300;

/// Bytes by which a file is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Content {
    /// There before the operation.
    Old,
    /// What the operation brings.
    New,
    /// What takes the source's place.
    Changed,
    /// What a second instance brings.
    Second,
    /// What the other user brings.
    Evil,
    /// What nobody may change.
    Canary,
    /// The second source of a snapshot, old and new.
    OldMore,
    NewMore,
}

const ALL: [Content; 8] = [
    Content::Old,
    Content::New,
    Content::Changed,
    Content::Second,
    Content::Evil,
    Content::Canary,
    Content::OldMore,
    Content::NewMore,
];

impl Content {
    /// Several pages, and a part of one.
    pub fn bytes(self) -> &'static [u8] {
        static BYTES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
        let all = BYTES.get_or_init(|| {
            let make = |content: &Content| noise(content.length(), *content as u64);
            ALL.iter().map(make).collect()
        });
        &all[self as usize]
    }

    fn length(self) -> usize {
        match self {
            Self::Old => 50_003,
            // A change in place keeps the length.
            Self::New | Self::Changed => 70_001,
            Self::Second => 61_007,
            Self::Evil => 40_009,
            Self::Canary => 3_001,
            Self::OldMore => 9_001,
            Self::NewMore => 12_289,
        }
    }

    pub fn of(bytes: &[u8]) -> Option<Self> {
        ALL.into_iter().find(|content| content.bytes() == bytes)
    }
}

/// Never zero, so that a hole is recognised.
pub fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed + 1);
    (0..length).map(|_| random.u8(1..)).collect()
}

/// The bytes of a record.
pub fn record(number: u64) -> Vec<u8> {
    noise(20_000 + number as usize * 1_111, 1000 + number)
}

/// Who may do what in the folder that the operation names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Trust {
    /// Only root may write to it.
    Own,
    /// A group may, of which the second actor is a member.
    Group,
    /// A group may write to the folder around it.
    Parent,
    /// Everybody may, but remove only their own files.
    Sticky,
    /// It belongs to the other user, in a folder like /tmp.
    Foreign,
}

impl std::fmt::Display for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// The folder of one run; removed when dropped.
pub struct World {
    root: tempfile::TempDir,
    pub trust: Trust,
}

impl World {
    pub fn new(base: &Path, trust: Trust) -> io::Result<Self> {
        let root = tempfile::Builder::new()
            .prefix("interference.")
            .permissions(Permissions::from_mode(0o755))
            .tempdir_in(base)?;
        let world = Self { root, trust };
        for folder in ["outside", "outside/links", "outside/links/sub", "src"] {
            folder_with(&world.at(folder), 0o755, None)?;
        }
        folder_with(&world.at("run"), 0o700, None)?;
        folder_with(&world.at("actor"), 0o755, Some((OTHER, GROUP)))?;
        world.file("outside/secret", Content::Canary, 0o600)?;
        world.file("outside/public", Content::Canary, 0o644)?;
        world.file("outside/links/keep", Content::Canary, 0o644)?;
        symlink("/bin/sh", world.at("outside/links/sh"))?;
        symlink("/bin/ls", world.at("outside/links/sub/ls"))?;
        world.file("src/model.bin", Content::New, 0o644)?;
        world.file("src/changed.bin", Content::Changed, 0o644)?;
        world.file("src/second.bin", Content::Second, 0o644)?;
        world.file("actor/evil.bin", Content::Evil, 0o644)?;
        chown(
            &world.at("actor/evil.bin"),
            Some(Uid::from_raw(OTHER)),
            Some(Gid::from_raw(GROUP)),
        )?;
        for folder in ["top", "top/work", "top/spare"] {
            folder_with(&world.at(folder), 0o755, None)?;
        }
        symlink("work", world.at("top/current"))?;
        Ok(world)
    }

    /// Gives others what they may do. Not before the operation's surroundings are made, which it might refuse else.
    pub fn open(&self) -> io::Result<()> {
        let (top, work) = match self.trust {
            Trust::Own => return Ok(()),
            Trust::Group => ((0o755, None), (0o2775, Some((0, GROUP)))),
            Trust::Parent => ((0o2775, Some((0, GROUP))), (0o755, None)),
            Trust::Sticky => ((0o755, None), (0o1777, None)),
            Trust::Foreign => ((0o1777, None), (0o755, Some((OTHER, GROUP)))),
        };
        permit(&self.at("top"), top.0, top.1)?;
        permit(&self.at("top/work"), work.0, work.1)?;
        permit(&self.at("top/spare"), work.0, work.1)
    }

    pub fn root(&self) -> &Path {
        self.root.path()
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// The folder as the operation names it: by a link, which an action may lead elsewhere.
    pub fn dir(&self) -> PathBuf {
        match self.trust {
            Trust::Own | Trust::Group | Trust::Parent => self.at("top/current"),
            // There such a link would be suspicious.
            Trust::Sticky | Trust::Foreign => self.at("top/work"),
        }
    }

    /// The folder itself.
    pub fn work(&self) -> PathBuf {
        self.at("top/work")
    }

    pub fn file(&self, name: &str, content: Content, mode: u32) -> io::Result<()> {
        let path = self.at(name);
        fs::write(&path, content.bytes())?;
        fs::set_permissions(&path, Permissions::from_mode(mode))
    }

    /// All folders in which the operation may have left something: where its path leads now, and where it led.
    pub fn homes(&self) -> Vec<PathBuf> {
        let mut homes = Vec::new();
        for entry in fs::read_dir(self.at("top")).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                homes.push(entry.path());
            }
        }
        homes.sort();
        homes
    }

    /// What is in a folder and below it.
    pub fn list(&self, name: &str) -> Listing {
        let mut all = BTreeMap::new();
        list(&self.at(name), Path::new(name), &mut all);
        Listing(all)
    }
}

fn folder_with(path: &Path, mode: u32, owner: Option<(u32, u32)>) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)?;
    permit(path, mode, owner)
}

fn permit(path: &Path, mode: u32, owner: Option<(u32, u32)>) -> io::Result<()> {
    if let Some((user, group)) = owner {
        chown(path, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))?;
    }
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Files with everything that others could change about them.
#[derive(PartialEq, Eq)]
pub struct Listing(BTreeMap<PathBuf, Entry>);

#[derive(PartialEq, Eq)]
struct Entry {
    mode: u32,
    owner: (u32, u32),
    holds: Vec<u8>,
}

fn list(path: &Path, name: &Path, all: &mut BTreeMap<PathBuf, Entry>) {
    let Ok(found) = fs::symlink_metadata(path) else {
        return;
    };
    let kind = found.file_type();
    let holds = if kind.is_symlink() {
        let link = fs::read_link(path).unwrap_or_default();
        link.as_os_str().as_bytes().to_vec()
    } else if kind.is_file() {
        fs::read(path).unwrap_or_default()
    } else {
        Vec::new()
    };
    let entry = Entry {
        mode: found.mode(),
        owner: (found.uid(), found.gid()),
        holds,
    };
    all.insert(name.to_path_buf(), entry);
    if kind.is_dir() {
        for inner in fs::read_dir(path).into_iter().flatten().flatten() {
            list(&inner.path(), &name.join(inner.file_name()), all);
        }
    }
}

impl Listing {
    /// How another listing of the same folder differs.
    pub fn changes(&self, now: &Self) -> Vec<String> {
        let mut changes = Vec::new();
        for (path, was) in &self.0 {
            let path = path.display();
            match now.0.get(Path::new(&path.to_string())) {
                None => changes.push(format!("{path} is gone")),
                Some(is) if is == was => {}
                Some(is) => changes.push(format!(
                    "{path} was {:o} {}:{} with {} bytes, and is {:o} {}:{} with {} {} bytes",
                    was.mode,
                    was.owner.0,
                    was.owner.1,
                    was.holds.len(),
                    is.mode,
                    is.owner.0,
                    is.owner.1,
                    is.holds.len(),
                    if is.holds == was.holds {
                        "equal"
                    } else {
                        "other"
                    },
                )),
            }
        }
        let made = now.0.keys().filter(|path| !self.0.contains_key(*path));
        changes.extend(made.map(|path| format!("{} is new", path.display())));
        changes
    }
}

pub fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}
