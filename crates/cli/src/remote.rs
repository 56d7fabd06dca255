//! URLs. The crate `dmafile-remote` opens them; a command without it starts the program of that name, which is this
//! command with it.

use crate::Failure;
use crate::args::UrlArgs;
use dmafile::internal::is_url;
use dmafile::{Buffer, RemoteObject, Verified, Verify};
use std::path::Path;
use std::sync::Arc;

/// The URL that was given in place of a path.
pub(crate) fn url(path: &Path) -> Option<&str> {
    path.to_str().filter(|text| is_url(text))
}

/// Notes how URLs are opened from now on. Without one in `files`, no option about them may be given.
pub(crate) fn configure<'f>(
    options: &UrlArgs,
    files: impl IntoIterator<Item = &'f Path>,
    quiet: bool,
) -> Result<(), Failure> {
    let given = [
        (options.cache.is_some(), "--cache"),
        (options.unpinned, "--unpinned"),
    ];
    if let Some((_, option)) = given.into_iter().find(|option| option.0)
        && !files.into_iter().any(|file| url(file).is_some())
    {
        return Err(Failure::usage(&format!("{option} is for URLs")));
    }
    set(options, quiet);
    Ok(())
}

impl Fetched {
    /// A file that begins at byte `at` of a buffer.
    pub(crate) fn of(
        object: &Arc<dyn RemoteObject>,
        buffer: &Buffer,
        at: u64,
        digest: Option<&Verified>,
    ) -> Self {
        let digest = digest.map(|own| (own.algorithm, own.digest.clone()));
        Self::in_memory(object, buffer.as_fd(), at, digest)
    }
}

/// The digest to compute of what is fetched into this place in a cache; None if it needs none.
pub(crate) fn digest_for<'s>(slots: impl IntoIterator<Item = &'s CacheSlot>) -> Option<Verify> {
    slots.into_iter().find_map(CacheSlot::digest)
}

/// Says that what was fetched is not kept; that does not keep anybody from using it.
pub(crate) fn not_kept(error: &dmafile::Error) {
    let why = error.render(&crate::Options);
    eprintln!("dmafile: not kept in the cache: {why}");
}

#[cfg(feature = "remote")]
mod with {
    use crate::args::{SaveArgs, UrlArgs};
    use crate::output::{Output, progress_bar, write_wanted_json};
    use crate::save::PROGRESS;
    use crate::{Failure, Launcher, signals};
    use dmafile::{
        Algorithm, Buffer, CancelToken, Check, Load, Model, ModelFolder, ModelObject, Opt, Origin,
        RemoteObject, Result, Verify,
    };
    use dmafile_record::{Snapshot, SnapshotLoad, StoredSnapshot};
    use dmafile_remote::{
        CacheOptions, CacheWrite, Cached, FetchedFile, OpenOptions, Remote, RemoteFolder,
        SaveCondition, SaveOptions,
    };
    use indicatif::BinaryBytes;
    use rustix::io::FdFlags;
    use std::ffi::OsStr;
    use std::fs::File;
    use std::io::{Read, Seek};
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::os::unix::process::CommandExt;
    use std::path::PathBuf;
    use std::sync::{Arc, LazyLock, Mutex, OnceLock};

    pub(crate) use dmafile_remote::{CacheSlot, is_collection};

    /// The word that begins a process which writes into a cache.
    pub(crate) const KEEPER: &str = "-keep";

    static OPTIONS: OnceLock<(UrlArgs, bool)> = OnceLock::new();

    static REMOTE: LazyLock<Remote> = LazyLock::new(|| {
        let (options, quiet) = OPTIONS.get().cloned().unwrap_or_default();
        Remote::new(OpenOptions {
            cache: options.cache.map(|folder| CacheOptions {
                folder,
                limit: options.cache_limit,
            }),
            offline: options.offline,
            unpinned: options.unpinned,
            waiting: (!quiet).then_some(|| {
                eprintln!("dmafile: waiting for another process that fetches it");
            }),
            cancel: signals::token(),
            ..OpenOptions::default()
        })
    });

    /// The objects that were opened last: one stays the same.
    static OPENED: Mutex<Vec<Arc<dyn RemoteObject>>> = Mutex::new(Vec::new());

    pub(super) fn set(options: &UrlArgs, quiet: bool) {
        let _ = OPTIONS.set((options.clone(), quiet));
    }

    pub(crate) fn open(url: &str) -> Result<Arc<dyn RemoteObject>> {
        let mut opened = OPENED.lock().expect("no holder of this lock panics");
        if let [object] = &opened[..] {
            return Ok(Arc::clone(object));
        }
        let object = REMOTE.open(url)?;
        *opened = vec![Arc::clone(&object)];
        Ok(object)
    }

    /// A folder that was listed, and has no snapshot: it is the model that will be opened.
    static LISTED: Mutex<Option<RemoteFolder>> = Mutex::new(None);

    /// The folder that a URL names, if a snapshot is in it.
    pub(crate) fn snapshot(url: &str) -> Result<Option<Box<dyn ModelFolder>>> {
        let Some(folder) = REMOTE.open_folder(url)? else {
            return Ok(None);
        };
        if SnapshotLoad::is_in(&folder)? {
            return Ok(Some(Box::new(folder)));
        }
        *LISTED.lock().expect("no holder of this lock panics") = Some(folder);
        Ok(None)
    }

    /// Saves a snapshot to a store.
    pub(crate) fn save_snapshot(
        snapshot: Snapshot,
        url: &str,
        cancel: &CancelToken,
    ) -> Result<StoredSnapshot> {
        REMOTE.save_snapshot(snapshot, url, cancel)
    }

    pub(crate) fn open_model(url: &str) -> Result<Model> {
        let listed = LISTED.lock().expect("no holder of this lock panics").take();
        let model = match listed {
            Some(folder) => Model::open_remote(&folder, None)?,
            None => REMOTE.open_model(url)?,
        };
        let objects = model.objects().into_iter().map(|object| object.0);
        *OPENED.lock().expect("no holder of this lock panics") = objects.collect();
        Ok(model)
    }

    /// The objects of a load.
    pub(crate) fn opened() -> Vec<Arc<dyn RemoteObject>> {
        OPENED
            .lock()
            .expect("no holder of this lock panics")
            .clone()
    }

    pub(crate) fn open_all(url: &str) -> Result<Vec<ModelObject>> {
        REMOTE.open_all(url)
    }

    /// Checks this machine, and what a URL names.
    pub(crate) fn doctor(url: Option<&str>) -> Vec<Check> {
        let mut checks = REMOTE.doctor();
        checks.extend(url.map(|url| REMOTE.doctor_of(url)));
        checks
    }

    /// What the cache has of a URL.
    pub(crate) fn find_cached(url: &str) -> Result<Option<PathBuf>> {
        REMOTE.find_cached(url)
    }

    /// The same, or the place in the cache where it will be; None without a cache.
    pub(crate) fn reserve(url: &str) -> Result<std::result::Result<PathBuf, Option<CacheSlot>>> {
        Ok(match REMOTE.reserve(url)? {
            Some(Cached::Here(path)) => Ok(path),
            Some(Cached::Absent(slot)) => Err(Some(slot)),
            Some(Cached::Closed(error)) => {
                super::not_kept(&error);
                Err(None)
            }
            None => Err(None),
        })
    }

    /// A file that has been fetched into memory.
    pub(crate) struct Fetched {
        name: String,
        object: Arc<dyn RemoteObject>,
        /// A process that is started inherits it.
        fd: Option<OwnedFd>,
        at: u64,
        digest: Option<(Algorithm, String)>,
    }

    impl Fetched {
        /// True if it was fetched from this object.
        pub(crate) fn is(&self, object: &Arc<dyn RemoteObject>) -> bool {
            Arc::ptr_eq(&self.object, object)
        }

        /// A file that begins at byte `at` of memory behind a descriptor.
        pub(crate) fn in_memory(
            object: &Arc<dyn RemoteObject>,
            fd: Option<BorrowedFd<'_>>,
            at: u64,
            digest: Option<(Algorithm, String)>,
        ) -> Self {
            let name = object.name();
            Self {
                name: name.rsplit('/').next().unwrap_or_default().to_string(),
                object: Arc::clone(object),
                fd: fd.and_then(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 3).ok()),
                at,
                digest,
            }
        }
    }

    /// Saves to a store.
    pub(crate) fn save(
        args: &SaveArgs,
        from: &OsStr,
        url: &str,
        out: Output,
    ) -> std::result::Result<u8, Failure> {
        let cancel = CancelToken::new();
        signals::interruptible(&cancel)?;
        let verify = args.given.parsed::<Verify>(Opt::Verify)?.pop();
        let condition = match &args.if_match {
            Some(etag) if !etag.starts_with('"') => {
                Some(SaveCondition::Version(format!("\"{etag}\"")))
            }
            Some(etag) => Some(SaveCondition::Version(etag.clone())),
            None => args.if_none_match.then_some(SaveCondition::Absent),
        };
        let bar = progress_bar(args.output.quiet, PROGRESS);
        let shown = bar.clone();
        let mut options = SaveOptions {
            length: args.given.number(Opt::Length),
            verify,
            connections: args
                .tuning
                .number(Opt::QueueDepth)
                .map(|depth| depth as u32),
            condition,
            cancel,
            ..SaveOptions::default()
        };
        if let Some(bar) = bar {
            options.progress = Some(Box::new(move |progress| {
                bar.set_length(progress.total);
                bar.set_position(progress.done);
            }));
        }
        let saved = REMOTE.save(&Origin::parse(from)?, url, &options);
        if let Some(bar) = shown {
            bar.abandon();
        }
        let saved = saved?;
        let rate = BinaryBytes((saved.bytes as f64 / saved.seconds.max(1e-9)) as u64);
        out.print(&format!(
            "saved {} in {:.3} s: {rate}/s; in {} {}\n",
            BinaryBytes(saved.bytes),
            saved.seconds,
            saved.parts,
            if saved.parts == 1 { "request" } else { "parts" },
        ))?;
        if let Some(digest) = &saved.digest {
            out.print(&format!("{digest}\n"))?;
        }
        write_wanted_json(&args.output.json, &saved).map(|()| 0)
    }

    /// Has what was fetched written into the cache: by a process of its own if COMMAND runs meanwhile.
    pub(crate) fn keep(
        slot: &CacheSlot,
        files: Vec<Fetched>,
        launcher: Option<&Launcher>,
    ) -> std::result::Result<(), Failure> {
        let with_fds = files.iter().map_while(|file| {
            Some(FetchedFile {
                name: &file.name,
                object: &*file.object,
                fd: file.fd.as_ref()?.as_fd(),
                at: file.at,
                digest: file.digest.as_ref().map(|own| (own.0, &*own.1)),
            })
        });
        let with_fds: Vec<_> = with_fds.collect();
        let write = if with_fds.len() == files.len() {
            slot.write(&with_fds)?
        } else {
            None
        };
        match (write, launcher) {
            (None, _) => Ok(()),
            (Some(write), None) => Ok(write.run()?),
            (Some(write), Some(launcher)) => {
                let all = files.iter().filter_map(|file| file.fd.as_ref());
                let inherit = |fd| Ok(rustix::io::fcntl_setfd(fd, FdFlags::empty())?);
                let inherited = all.map(inherit).chain([slot.inherit()]);
                let started = inherited.collect::<std::io::Result<()>>();
                let started = started.and_then(|()| start(&write, launcher));
                if let Err(error) = started {
                    // COMMAND has what it needs.
                    eprintln!("dmafile: cannot write to the cache: {error}");
                }
                Ok(())
            }
        }
    }

    /// Loads the small files next to a model's weights into memory of their own; with their names and what they were
    /// fetched from.
    pub(crate) fn load_others(
        url: &str,
        slot: Option<&CacheSlot>,
        token: &CancelToken,
    ) -> Result<Vec<(String, Buffer, Fetched)>> {
        let mut all = Vec::new();
        for (name, object) in REMOTE.open_others(url)? {
            let mut load = Load::of_object(Arc::clone(&object)).exact_size(true);
            if let Some(verify) = super::digest_for(slot) {
                load = load.verify(verify);
            }
            let loaded = load.names(&crate::Options).cancel(token.clone()).run()?;
            let (digest, at) = (loaded.report.verify.first(), loaded.report.offset);
            let fetched = Fetched::of(&object, &loaded.buffer, at, digest);
            all.push((name, loaded.buffer, fetched));
        }
        Ok(all)
    }

    /// Starts a process that runs on beside COMMAND, and is not its child.
    fn start(write: &CacheWrite, launcher: &Launcher) -> std::io::Result<()> {
        let memory = rustix::fs::memfd_create("cache", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut text = File::from(memory);
        serde_json::to_writer(&text, write)?;
        text.rewind()?;
        let started = launcher
            .command()
            .arg(KEEPER)
            .stdin(text)
            .stdout(std::process::Stdio::null())
            .process_group(0)
            .status()?;
        if !started.success() {
            return Err(std::io::Error::other(started.to_string()));
        }
        Ok(())
    }

    /// Is started by [`start`], and starts what writes.
    pub(crate) fn keep_here(
        launcher: &Launcher,
        is_last: bool,
    ) -> std::result::Result<u8, Failure> {
        if !is_last {
            let mut last = launcher.command();
            last.arg(KEEPER).arg("now");
            let started = last.spawn();
            return match started {
                Ok(_) => Ok(0),
                Err(error) => Err(Failure::os("cannot start", "the cache", &error, "")),
            };
        }
        let mut text = Vec::new();
        let read = std::io::stdin().read_to_end(&mut text).map(drop);
        let write = read.and_then(|()| Ok(serde_json::from_slice::<CacheWrite>(&text)?));
        let write = write.map_err(|error| Failure::os("cannot read", "stdin", &error, ""))?;
        write.run()?;
        Ok(0)
    }
}

#[cfg(feature = "remote")]
use with::set;
#[cfg(feature = "remote")]
pub(crate) use with::{
    CacheSlot, Fetched, KEEPER, doctor, find_cached, is_collection, keep, keep_here, load_others,
    open, open_all, open_model, opened, reserve, save, save_snapshot, snapshot,
};

#[cfg(not(feature = "remote"))]
mod without {
    use crate::args::{SaveArgs, UrlArgs};
    use crate::output::Output;
    use crate::{Failure, Launcher};
    use dmafile::{
        Algorithm, Buffer, CancelToken, Check, Error, Health, Model, ModelFolder, ModelObject,
        RemoteObject, Result, Verify,
    };
    use dmafile_record::{Snapshot, StoredSnapshot};
    use std::ffi::{OsStr, OsString};
    use std::os::fd::BorrowedFd;
    use std::os::unix::process::CommandExt;
    use std::path::PathBuf;
    use std::process::Command;
    use std::sync::Arc;

    const PROGRAM: &str = "dmafile-remote";
    /// Set for the program, which must not start itself.
    const STARTED: &str = "DMAFILE_REMOTE_STARTED";

    /// Becomes the program that opens URLs; returns only on failure.
    pub(crate) fn become_program(args: &[OsString]) -> Failure {
        let missing = |why: &str| Failure {
            line: format!("cannot open URLs: {why}; install the package {PROGRAM}"),
            status: 1,
        };
        if std::env::var_os(STARTED).is_some() {
            return missing(&format!("{PROGRAM} was built without that"));
        }
        let error = Command::new(program())
            .args(&args[1..])
            .env(STARTED, "1")
            .exec();
        match error.kind() {
            std::io::ErrorKind::NotFound => {
                missing("a part of dmafile does that which is not installed")
            }
            _ => Failure::os("cannot run", PROGRAM, &error, ""),
        }
    }

    /// The program that opens URLs, if it is beside this one, or its name.
    fn program() -> PathBuf {
        let own = std::env::current_exe().unwrap_or_default();
        let beside = own.with_file_name(PROGRAM);
        if beside.exists() {
            beside
        } else {
            PathBuf::from(PROGRAM)
        }
    }

    pub(crate) fn doctor(_: Option<&str>) -> Vec<Check> {
        let name = "stores";
        let asked = Command::new(program()).arg("--version").output();
        let check = if asked.is_ok_and(|asked| asked.status.success()) {
            Check::new(name, Health::Good, format!("{PROGRAM} opens URLs"))
        } else {
            let found = "a part of dmafile that opens URLs is not installed";
            let check = Check::new(name, Health::Absent, found);
            check.remedy(format!("install the package {PROGRAM}"))
        };
        vec![check]
    }

    fn unavailable<T>() -> Result<T> {
        Err(Error::new(
            "cannot open URLs",
            "this program was built without that",
        ))
    }

    pub(crate) fn open(_: &str) -> Result<Arc<dyn RemoteObject>> {
        unavailable()
    }

    pub(crate) fn open_model(_: &str) -> Result<Model> {
        unavailable()
    }

    pub(crate) fn snapshot(_: &str) -> Result<Option<Box<dyn ModelFolder>>> {
        unavailable()
    }

    pub(crate) fn save_snapshot(_: Snapshot, _: &str, _: &CancelToken) -> Result<StoredSnapshot> {
        unavailable()
    }

    pub(crate) fn open_all(_: &str) -> Result<Vec<ModelObject>> {
        unavailable()
    }

    pub(crate) fn load_others(
        _: &str,
        _: Option<&CacheSlot>,
        _: &CancelToken,
    ) -> Result<Vec<(String, Buffer, Fetched)>> {
        unavailable()
    }

    pub(crate) fn is_collection(_: &str) -> bool {
        false
    }

    pub(super) fn set(_: &UrlArgs, _: bool) {}

    pub(crate) fn opened() -> Vec<Arc<dyn RemoteObject>> {
        Vec::new()
    }

    pub(crate) fn find_cached(_: &str) -> Result<Option<PathBuf>> {
        unavailable()
    }

    pub(crate) fn save(
        _: &SaveArgs,
        _: &OsStr,
        _: &str,
        _: Output,
    ) -> std::result::Result<u8, Failure> {
        Ok(unavailable()?)
    }

    /// There is none.
    pub(crate) enum CacheSlot {}

    impl CacheSlot {
        pub(crate) fn digest(&self) -> Option<Verify> {
            match *self {}
        }
    }

    pub(crate) fn reserve(_: &str) -> Result<std::result::Result<PathBuf, Option<CacheSlot>>> {
        unavailable()
    }

    pub(crate) struct Fetched;

    impl Fetched {
        pub(crate) fn is(&self, _: &Arc<dyn RemoteObject>) -> bool {
            false
        }

        pub(crate) fn in_memory(
            _: &Arc<dyn RemoteObject>,
            _: Option<BorrowedFd<'_>>,
            _: u64,
            _: Option<(Algorithm, String)>,
        ) -> Self {
            Self
        }
    }

    pub(crate) fn keep(
        slot: &CacheSlot,
        _: Vec<Fetched>,
        _: Option<&Launcher>,
    ) -> std::result::Result<(), Failure> {
        match *slot {}
    }
}

#[cfg(not(feature = "remote"))]
use without::set;
#[cfg(not(feature = "remote"))]
pub(crate) use without::{
    CacheSlot, Fetched, become_program, doctor, find_cached, is_collection, keep, load_others,
    open, open_all, open_model, opened, reserve, save, save_snapshot, snapshot,
};
