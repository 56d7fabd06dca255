//! The arguments. Completions and the man page come from these definitions.

use crate::command::name_of;
use crate::given::{HowToLoad, HowToSave, OfHold, OfLoad, OfSave, OfShow};
use crate::output::{Output, Text};
use crate::remote;
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{ArgGroup, ArgMatches, Args, FromArgMatches, Parser, Subcommand};
use dmafile::{
    Error, Kind, Load, Model, ModelFolder, ModelObject, Operation, Opt, OptionGroup, OptionInfo,
    Origin, Pages, Save, Verify,
};
use dmafile_gpu::parse_kind;
use dmafile_hold::Hold;
use dmafile_record::{Snapshot, SnapshotLoad};
use nix::unistd::Group;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

/// Moves large files straight between disk and memory that devices can share.
#[derive(Debug, Parser)]
#[command(
    name = "dmafile",
    version,
    arg_required_else_help = true,
    subcommand_required = true
)]
#[command(after_help = "Exit status: 0 done, 1 failed, 2 bad usage, 130 interrupted.")]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// Defines the subcommands. Arguments are built only for the one that is called: to build those of all
/// takes a tenth of the time that the command needs to start.
macro_rules! subcommands {
    ($(#[doc = $about:literal] $name:literal => $variant:ident($args:ty),)+) => {
        /// What to do.
        #[derive(Debug)]
        pub enum Command {
            $(#[doc = $about] $variant($args),)+
        }

        impl FromArgMatches for Command {
            fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
                match matches.subcommand() {
                    $(Some(($name, own)) => <$args>::from_arg_matches(own).map(Self::$variant),)+
                    _ => Err(clap::Error::new(ErrorKind::MissingSubcommand)),
                }
            }

            fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
                *self = Self::from_arg_matches(matches)?;
                Ok(())
            }
        }

        impl Subcommand for Command {
            fn augment_subcommands(command: clap::Command) -> clap::Command {
                command$(.subcommand(
                    clap::Command::new($name).about($about.trim()).defer(|own| {
                        <$args>::augment_args(own).about($about.trim())
                    }),
                ))+
            }

            fn augment_subcommands_for_update(command: clap::Command) -> clap::Command {
                Self::augment_subcommands(command)
            }

            fn has_subcommand(name: &str) -> bool {
                [$($name),+].contains(&name)
            }
        }
    };
}

subcommands! {
    /// Load a file into memory, and pass it to a command
    "load" => Load(LoadArgs),
    /// Save memory, a file or a pipe to a file, atomically
    "save" => Save(SaveArgs),
    /// Hold a model in memory, for other processes to take
    "hold" => Hold(HoldArgs),
    /// Take memory from a hold, and pass it to a command
    "take" => Take(TakeArgs),
    /// List holds and the processes that have taken them
    "holds" => Holds(HoldsArgs),
    /// End a hold; processes keep what they have taken
    "release" => Release(ReleaseArgs),
    /// Save running processes with CRIU; memory that is held stays out of the images
    "freeze" => Freeze(FreezeArgs),
    /// Let frozen processes run again, with their memory from the hold
    "thaw" => Thaw(ThawArgs),
    /// List the tensors of a model; reads headers only
    "show" => Show(ShowArgs),
    /// Print the plan for a load and the reason for each choice; loads nothing
    "explain" => Explain(ExplainArgs),
    /// Print what this machine supports, and how to enable what it lacks
    "doctor" => Doctor(DoctorArgs),
    /// Show which memory is pinned, by which processes, and against which limits
    "pins" => Pins(PinsArgs),
    /// Compare loading with read() on this machine; takes about a minute
    "bench" => Bench(BenchArgs),
    /// Print completions for a shell
    "completions" => Completions(CompletionsArgs),
    /// Write the man pages (roff)
    "man" => Man(ManArgs),
}

/// `dmafile completions`
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// `dmafile man`
#[derive(Args, Debug)]
pub struct ManArgs {
    /// The folder to write a page for each subcommand to [default: stdout, dmafile(1) only]
    pub dir: Option<PathBuf>,
}

pub const WHAT: &str = "What to load";
pub const WHERE: &str = "Where to";
const SOCKET: &str = "The socket";
const OUTPUT: &str = "Output";
pub const TUNING: &str = "Tuning, rarely needed";
/// The end of a short help.
const SHORT: &str = "Sizes are powers of 1024: 512K, 8M, 1GiB. --help describes everything, with options for tuning.";

/// The load of a snapshot, and its folder if that is in a store.
pub type FoundSnapshot = (SnapshotLoad, Option<Box<dyn ModelFolder>>);

/// Opens a model by its path or URL.
pub fn open_model(file: &Path) -> dmafile::Result<Model> {
    match remote::url(file) {
        Some(url) => remote::open_model(url),
        None => Model::open(file),
    }
}

impl Command {
    /// Returns `true` if it reads from a URL.
    #[cfg(not(feature = "remote"))]
    pub fn has_url(&self) -> bool {
        let is_url = |path: &Path| remote::url(path).is_some();
        match self {
            Self::Load(args) => is_url(&args.options.file),
            Self::Explain(args) => is_url(&args.options.file),
            Self::Show(args) => is_url(&args.file),
            Self::Doctor(args) => is_url(&args.path),
            Self::Hold(args) => args.models.iter().any(|model| is_url(model)),
            Self::Save(args) => args.parts().is_some_and(|parts| is_url(parts.1)),
            _ => false,
        }
    }
}

/// What to load, and into which memory.
#[derive(Args, Clone, Debug)]
pub struct LoadOptions {
    /// A file, a block device, a model of several files, a snapshot, or a URL
    ///
    /// A model of several files is given by its folder, its *.safetensors.index.json, or the first file
    /// of a split GGUF; a snapshot by its folder. URLs are https://HOST/PATH, hf://OWNER/NAME[@REVISION][/FILE],
    /// s3://BUCKET/KEY, gs://BUCKET/KEY and az://CONTAINER/KEY; a key with a slash at its end is a folder.
    pub file: PathBuf,

    #[command(flatten)]
    pub given: OfLoad,

    #[command(flatten)]
    pub urls: UrlArgs,

    /// The file or folder in the cache that has what the URL stands for.
    #[arg(skip)]
    here: OnceLock<PathBuf>,
}

/// How URLs are opened.
#[derive(Args, Clone, Debug, Default)]
pub struct UrlArgs {
    /// Keep what a URL stands for in this folder, for the next time
    ///
    /// It has the layout of the Hugging Face Hub's cache, so that other programs use what is in it, too. The files are
    /// written while COMMAND already runs. Processes that need the same at the same time fetch it once.
    #[arg(long, value_name = "DIR", help_heading = WHAT)]
    pub cache: Option<PathBuf>,

    /// The most that the cache may hold: what was not used for the longest time is removed
    #[arg(long, value_name = "BYTES", value_parser = size, requires = "cache", help_heading = WHAT, hide_short_help = true)]
    pub cache_limit: Option<u64>,

    /// Ask no server: what a URL stands for is in the cache, or it is an error
    #[arg(long, requires = "cache", help_heading = WHAT, hide_short_help = true)]
    pub offline: bool,

    /// Load what its server names no version of, too; if it is replaced meanwhile, two versions are mixed
    #[arg(long, help_heading = WHAT, hide_short_help = true)]
    pub unpinned: bool,
}

impl LoadOptions {
    /// The file, or what the cache has in place of a URL.
    pub fn file(&self) -> &Path {
        self.here.get().unwrap_or(&self.file)
    }

    /// From now on, [`LoadOptions::file`] is what the cache has. What is not there is left to the store.
    pub fn look_in_cache(&self) -> Result<(), crate::Failure> {
        remote::configure(&self.urls, [self.file.as_path()], true)?;
        if let Some(url) = remote::url(&self.file)
            && let Some(path) = remote::find_cached(url)?
        {
            let _ = self.here.set(path);
        }
        Ok(())
    }

    /// The same. What is not there, and will be loaded as a whole, gets a place in the cache.
    pub fn reserve(&self, quiet: bool) -> Result<Option<remote::CacheSlot>, crate::Failure> {
        let parts = [Opt::Tensors, Opt::Offset, Opt::Length];
        let Some(url) = remote::url(&self.file) else {
            self.look_in_cache()?;
            return Ok(None);
        };
        if parts.into_iter().any(|part| self.given.has(part)) {
            self.look_in_cache()?;
            return Ok(None);
        }
        // What other stores say of an object is not kept with it.
        let compares = self.given.texts(Opt::Verify).next() == Some("store");
        if compares && !self.file.starts_with("hf:") {
            remote::configure(&UrlArgs::default(), [self.file.as_path()], quiet)?;
            return Ok(None);
        }
        remote::configure(&self.urls, [self.file.as_path()], quiet)?;
        match remote::reserve(url)? {
            Ok(path) => {
                let _ = self.here.set(path);
                Ok(None)
            }
            Err(slot) => Ok(slot),
        }
    }

    /// What to load: bytes of a file, or a model.
    fn source(&self) -> dmafile::Result<Load> {
        let tensors = self.given.parsed(Opt::Tensors)?;
        let url = remote::url(self.file());
        if tensors.is_empty() && !self.is_collection() {
            // A range is always one of the named file.
            return match url {
                Some(url) => Ok(Load::of_object(remote::open(url)?)),
                None => Ok(Load::new(self.file())),
            };
        }
        let model = open_model(self.file())?;
        match &tensors[..] {
            [] => Ok(model.load()),
            chosen => model.load_tensors(chosen),
        }
    }

    /// Returns `true` if it is a model of several files, or one in a folder.
    pub fn is_collection(&self) -> bool {
        let range = self.given.has(Opt::Offset) || self.given.has(Opt::Length);
        let is_collection = || match remote::url(self.file()) {
            Some(url) => remote::is_collection(url),
            None => Model::is_collection(self.file()),
        };
        !range && is_collection()
    }

    /// The name of the file that COMMAND gets.
    pub fn name(&self) -> OsString {
        match remote::url(&self.file) {
            // Without the query, which may be a signature.
            Some(url) => name_of(Path::new(url.split(['?', '#']).next().unwrap_or(url))),
            None => name_of(&self.file),
        }
    }

    /// The requested kind of memory.
    pub fn to(&self) -> &str {
        self.given.texts(Opt::To).next().unwrap_or("memfd")
    }

    /// Returns `true` if the requested memory is a dma-buf.
    pub fn exports(&self) -> bool {
        use Kind::{DmaBuf, Heap, Module, Udmabuf};
        matches!(self.to().parse(), Ok(Udmabuf | Heap(_) | Module | DmaBuf))
    }

    /// The load they describe.
    pub fn load(&self, tuning: &HowToLoad) -> dmafile::Result<Load> {
        let all = |option| option != Opt::Tensors;
        Ok(self.some(self.source()?, tuning, all))
    }

    /// The same into the caller's memory, of whatever kind it is.
    pub fn load_elsewhere(&self, tuning: &HowToLoad) -> dmafile::Result<Load> {
        let rest = |option| option != Opt::Tensors && option != Opt::To;
        Ok(self.some(self.source()?, tuning, rest))
    }

    /// The load of a snapshot that they describe; None if the file is not one.
    pub fn snapshot(
        &self,
        tuning: &HowToLoad,
        exact_size: bool,
    ) -> dmafile::Result<Option<FoundSnapshot>> {
        let url = remote::url(self.file());
        let folder = url.map(remote::snapshot).transpose()?.flatten();
        let is_here = url.is_none() && SnapshotLoad::is_snapshot(self.file());
        if folder.is_none() && !is_here {
            return Ok(None);
        }
        let what = OptionInfo::all(Operation::Load).filter(|info| info.group == OptionGroup::What);
        if let Some(info) = what.into_iter().find(|info| self.given.has(info.option)) {
            let why = "a snapshot is loaded whole, and compared with the digests that it has";
            return Err(Error::usage(info.option, why));
        }
        let (options, tuning) = (self.clone(), tuning.clone());
        let load = SnapshotLoad::new(self.file()).names(&crate::Options);
        let load = load.each(move |_, load| options.tune(load, &tuning).exact_size(exact_size));
        Ok(Some((load, folder)))
    }

    /// Into which memory, and how.
    pub fn tune(&self, load: Load, tuning: &HowToLoad) -> Load {
        self.some(load, tuning, |option| {
            matches!(option, Opt::To | Opt::Pages)
        })
    }

    fn some(&self, load: Load, tuning: &HowToLoad, which: fn(Opt) -> bool) -> Load {
        let some = self.given.all().iter().filter(|given| which(given.0));
        load.kinds(parse_kind)
            .set_all(some)
            .names(&crate::Options)
            .set_all(tuning.all())
    }
}

/// What a load or a save prints.
#[derive(Args, Clone, Debug)]
pub struct OutputArgs {
    /// Write a timeline that Perfetto opens (Chrome trace format)
    #[arg(long, value_name = "OUT.json", help_heading = OUTPUT)]
    pub trace: Option<PathBuf>,

    /// Print the report as one JSON object on stdout, or to PATH
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true)]
    #[arg(help_heading = OUTPUT)]
    pub json: Option<Option<PathBuf>>,

    /// Also print the plan, the reason for each choice, and the phases
    #[arg(long, short, conflicts_with = "quiet", help_heading = OUTPUT)]
    pub verbose: bool,

    /// Suppress text and progress (errors and JSON are still written)
    #[arg(long, short, help_heading = OUTPUT)]
    pub quiet: bool,
}

impl OutputArgs {
    /// Where text for people goes; `deliver`: stdout is COMMAND's.
    pub fn place(&self, deliver: bool) -> Output {
        Output {
            text: match (self.quiet, deliver || matches!(self.json, Some(None))) {
                (true, _) => Text::Nowhere,
                (false, true) => Text::Stderr,
                (false, false) => Text::Stdout,
            },
            verbose: self.verbose,
        }
    }
}

/// `dmafile load`
#[derive(Args, Debug)]
#[command(
    after_help = SHORT,
    after_long_help = "COMMAND inherits the buffer: DMAFILE_FD is its descriptor, DMAFILE_BYTES how \
                  many bytes are in it, DMAFILE_OFFSET where they start. dmafile execs COMMAND, so \
                  its exit status is the command's; 127 when it is not found, 126 when it can't be \
                  run.\n\n\
                  {} in an argument of COMMAND becomes a path to the memory, for programs that open \
                  files: it has the file's name, and is removed when COMMAND ends. For a model of \
                  several files it is a folder with a separate buffer for each file, or, if FILE is \
                  one of them, that file in the folder. DMAFILE_PATH is the same path; without {} it \
                  is /proc/PID/fd/N, if there is one descriptor and the bytes start at 0. A dma-buf \
                  has no path. docs/consumers.md lists programs and devices that can use the memory.\n\n\
                  Each of a model's files begins at a multiple of 2 MiB. Each tensor is at the offset \
                  `at` that `dmafile show --json` prints, even if only some are loaded.\n\n\
                  Each source of a snapshot becomes a separate buffer, and is compared with its size and \
                  digest. The three variables, and DMAFILE_NAMES, are then comma-separated lists.\n\n\
                  Sizes are powers of 1024: 4096, 512K, 8M, 1GiB."
)]
pub struct LoadArgs {
    #[command(flatten)]
    pub options: LoadOptions,

    #[command(flatten)]
    pub output: OutputArgs,

    #[command(flatten)]
    pub tuning: HowToLoad,

    /// A command that inherits the buffer; {} in its arguments becomes a path to it
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// `dmafile hold`
#[derive(Args, Debug)]
#[command(
    after_help = SHORT,
    after_long_help = "Each file is loaded into a separate buffer, which cannot be changed unless --writable is \
                  given. When it is ready, the command prints one JSON object; it runs until it is released, \
                  interrupted, or idle for too long (exit status 0). Processes keep what they have taken, \
                  even if the holder is killed.\n\n\
                  The socket is $XDG_RUNTIME_DIR/dmafile/NAME (/run/dmafile/NAME for root; without that \
                  variable /dev/shm/dmafile-UID/NAME), or the one that it was started with (LISTEN_FDS). Users with write permission on the socket may take the files.\n\n\
                  docs/holding.md has a unit for systemd. Sizes are powers of 1024; times are written 500ms, \
                  60s, 10m, 2h."
)]
pub struct HoldArgs {
    /// Files, models and URLs: a model's folder or index stands for all of its files
    #[arg(required = true, value_name = "MODEL")]
    pub models: Vec<PathBuf>,

    /// The name: letters, digits, ., _ and - [default: the name of the file without its extension,
    /// or of the folder]
    #[arg(long)]
    pub name: Option<String>,

    /// The path of the socket, in a folder that other users can't write to
    #[arg(long, value_name = "SOCKET", help_heading = SOCKET)]
    pub socket: Option<PathBuf>,

    /// The permissions of the socket, in octal [default: 0600; with --group 0660]
    #[arg(long, value_name = "MODE", value_parser = mode, help_heading = SOCKET)]
    pub mode: Option<u32>,

    /// The group of the socket, by name or number
    #[arg(long, help_heading = SOCKET)]
    pub group: Option<String>,

    /// Replace the holder that serves at this socket, and end it
    #[arg(long, help_heading = SOCKET)]
    pub replace: bool,

    /// End once no process has been connected, or known to have the memory, for this long
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub idle: Option<Duration>,

    /// Create a folder that every program of this user can open as the model while it is held
    #[arg(long, value_name = "DIR")]
    pub folder: Option<PathBuf>,

    /// Notify systemd when it serves, and have it keep the memory for the next start (Type=notify)
    #[arg(long)]
    pub notify: bool,

    #[command(flatten)]
    pub given: OfHold,

    #[command(flatten)]
    pub urls: UrlArgs,

    /// Let processes write to the memfds they take; the size stays sealed
    #[arg(long, help_heading = WHERE)]
    pub writable: bool,

    #[command(flatten)]
    pub tuning: HowToLoad,
}

/// What a hold fetches, and where it is to be kept.
pub struct HeldUrl {
    pub url: String,
    pub slot: remote::CacheSlot,
    pub objects: Vec<ModelObject>,
}

impl HoldArgs {
    /// The hold they describe.
    pub fn hold(&self) -> Result<(Hold, Vec<HeldUrl>), crate::Failure> {
        remote::configure(&self.urls, self.models.iter().map(PathBuf::as_path), true)?;
        let (mut paths, mut objects, mut absent) = (Vec::new(), Vec::new(), Vec::new());
        for model in &self.models {
            let Some(url) = remote::url(model) else {
                paths.push(model.clone());
                continue;
            };
            match remote::reserve(url)? {
                Ok(path) => paths.push(path),
                Err(slot) => {
                    let all = remote::open_all(url)?;
                    absent.extend(slot.map(|slot| HeldUrl {
                        url: url.to_string(),
                        slot,
                        objects: all.clone(),
                    }));
                    objects.push((model, all));
                    paths.push(model.clone());
                }
            }
        }
        let tuning = self.tuning.clone();
        let to = self.given.texts(Opt::To).last().map(parse_kind);
        let mut hold = Hold::of(paths)
            .names(&crate::Options)
            .to(to.transpose()?.unwrap_or(Kind::Memfd))
            .pages(self.given.parsed(Opt::Pages)?.pop().unwrap_or(Pages::Auto))
            .writable(self.writable)
            .notify(self.notify)
            .inherit(true)
            .replace(self.replace)
            .each(move |load| load.set_all(tuning.all()));
        for (model, all) in objects {
            hold = hold.objects(model, all);
        }
        if let Some(name) = &self.name {
            hold = hold.name(name);
        }
        if let Some(socket) = &self.socket {
            hold = hold.socket(socket);
        }
        if let Some(mode) = self.mode {
            hold = hold.mode(mode);
        }
        if let Some(group) = &self.group {
            hold = hold.group(group_number(group)?);
        }
        if let Some(idle) = self.idle {
            hold = hold.idle(idle);
        }
        if let Some(folder) = &self.folder {
            hold = hold.folder(folder);
        }
        if let Some(verify) = self.given.parsed(Opt::Verify)?.pop() {
            hold = hold.verify(verify);
        } else if let Some(verify) = remote::digest_for(absent.iter().map(|one| &one.slot)) {
            hold = hold.verify(verify);
        }
        Ok((hold, absent))
    }
}

/// The ID of a group.
fn group_number(group: &str) -> Result<u32, crate::Failure> {
    if let Ok(number) = group.parse() {
        return Ok(number);
    }
    match Group::from_name(group) {
        Ok(Some(found)) => Ok(found.gid.as_raw()),
        Ok(None) => Err(crate::Failure::usage(&format!(
            "--group: there is no group '{}'",
            dmafile::internal::one_line(group)
        ))),
        Err(errno) => Err(crate::Failure::os(
            "cannot look up the group",
            group,
            &errno.into(),
            "",
        )),
    }
}

/// `dmafile take`
#[derive(Args, Debug)]
#[command(
    after_help = "COMMAND inherits the memory: DMAFILE_FD, DMAFILE_NAMES, DMAFILE_BYTES and \
                  DMAFILE_OFFSET are comma-separated lists, one entry per file. {} in an argument of \
                  COMMAND (and then DMAFILE_PATH) is a path that any program can open: a file, or a \
                  folder with all of them. dmafile execs COMMAND, so its exit status is the command's; \
                  127 when it is not found, 126 when it can't be run.\n\n\
                  Without COMMAND it prints what it took. Times are written 500ms, 60s, 10m, 2h."
)]
pub struct TakeArgs {
    /// The name of the hold
    pub name: String,

    /// The path of the socket [default: that of this user, or else of root]
    #[arg(long, value_name = "SOCKET")]
    pub socket: Option<PathBuf>,

    /// How long to wait for the hold to appear [default: not at all]
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub wait: Option<Duration>,

    /// Print what was taken as one JSON object on stdout, or to PATH
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true)]
    pub json: Option<Option<PathBuf>>,

    /// Suppress notes (errors and JSON are still written)
    #[arg(long, short)]
    pub quiet: bool,

    /// A command that inherits the memory
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// `dmafile holds`
#[derive(Args, Debug)]
pub struct HoldsArgs {
    /// The path of a socket [default: all of this user and of root]
    #[arg(long, value_name = "SOCKET")]
    pub socket: Option<PathBuf>,

    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
}

/// `dmafile release`
#[derive(Args, Debug)]
pub struct ReleaseArgs {
    /// The name of the hold
    pub name: String,

    /// The path of the socket [default: that of this user, or else of root]
    #[arg(long, value_name = "SOCKET")]
    pub socket: Option<PathBuf>,
}

/// `dmafile freeze`
#[derive(Args, Debug)]
#[command(
    override_usage = "dmafile freeze [OPTIONS] <PID>... <DIR> [-- <CRIU OPTIONS>]",
    after_help = SHORT,
    after_long_help = "The processes and their descendants end when all images are on the disk; if anything fails, \
                  they run on. Memory that they took from a hold is not in the images, which name it instead. \
                  Other memory that processes share (memfds, mappings with MAP_SHARED) is saved directly, many \
                  objects at once. It needs root, and criu 3.19 or later, whose options follow --, such as \
                  --tcp-close."
)]
pub struct FreezeArgs {
    /// Processes, and the folder for the images, which must not exist
    #[arg(required = true, num_args = 2.., value_names = ["PID", "DIR"])]
    pub words: Vec<OsString>,

    /// The path of a socket of a hold that `dmafile holds` does not list; repeat it for several
    #[arg(long, value_name = "SOCKET")]
    pub socket: Vec<PathBuf>,

    /// Let the processes run on afterwards
    #[arg(long)]
    pub leave_running: bool,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,

    /// Options of `criu dump`
    #[arg(last = true, value_name = "CRIU OPTIONS")]
    pub options: Vec<OsString>,
}

/// `dmafile thaw`
#[derive(Args, Debug)]
#[command(
    after_help = SHORT,
    after_long_help = "All images are checked first. Held memory is taken from its hold; if nothing holds it, the file \
                  is loaded, once for all processes on this machine that need it. The command stays until the \
                  processes end, and ends with the status of the last one, unless --detach is given. It needs \
                  root, and criu 3.19 or later, whose options follow --."
)]
pub struct ThawArgs {
    /// The folder that `dmafile freeze` has written
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,

    /// Write the process ID of each frozen PID to this file, one per line, when they run
    #[arg(long, value_name = "PATH")]
    pub pidfile: Option<PathBuf>,

    /// Return when they run
    #[arg(long)]
    pub detach: bool,

    /// Options of `criu restore`
    #[arg(last = true, value_name = "CRIU OPTIONS")]
    pub options: Vec<OsString>,
}

/// `dmafile save`
#[derive(Args, Clone, Debug)]
#[command(
    override_usage = "dmafile save [OPTIONS] <SRC>... <DEST>",
    after_help = SHORT,
    after_long_help = "The bytes go to a temporary file in the same folder, which replaces DEST in one step when all \
                  of them are on the disk: a crash leaves the old file or the new one. A file that is \
                  replaced keeps its mode, owner and extended attributes; a symbolic link is followed. \
                  With --offset the bytes go into an existing file or block device, which is not atomic. \
                  Exit status 0 means that everything is on the disk, unless --no-sync is given.\n\n\
                  An object of a store (s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY) is replaced when \
                  all bytes have arrived. Exit status 0 means that the store has acknowledged it.\n\n\
                  Several sources, or one with =NAME, make a snapshot in the folder DEST (in a store: a URL with \
                  a slash at its end): they become valid all at once, and until then the previous snapshot \
                  stays valid. `dmafile load DEST` loads them again.\n\n\
                  Sizes are powers of 1024: 4096, 512K, 8M, 1GiB."
)]
pub struct SaveArgs {
    /// SRC is what to save: a file, fd:N, or - (standard input), and for a snapshot SRC=NAME. DEST is
    /// where to: a file, a folder for a snapshot, or the URL of an object
    ///
    /// fd:N is a memfd, a dma-buf, any open file or a pipe; fd:N@OFFSET starts at that byte. A pipe is
    /// saved to its end. Only a snapshot has several sources; standard input is fd:0=NAME there.
    // One argument, because clap takes options between two only if each has one value.
    #[arg(value_name = "SRC... DEST", required = true)]
    pub paths: Vec<OsString>,

    #[command(flatten)]
    pub given: OfSave,

    /// Save only if there is no such object; DEST is a URL
    #[arg(long, help_heading = WHAT, conflicts_with = "if_match")]
    pub if_none_match: bool,

    /// Save only if the object has this ETag, as `dmafile save --json` prints it; DEST is a URL
    #[arg(long, value_name = "ETAG", help_heading = WHAT)]
    pub if_match: Option<String>,

    /// Print the plan and the reason for each choice; save nothing
    #[arg(long, help_heading = OUTPUT, conflicts_with = "trace")]
    pub explain: bool,

    #[command(flatten)]
    pub output: OutputArgs,

    #[command(flatten)]
    pub tuning: HowToSave,
}

impl SaveArgs {
    /// The sources and the destination; None if one of them is not there.
    pub fn parts(&self) -> Option<(&[OsString], &Path)> {
        let (to, from) = self.paths.split_last()?;
        (!from.is_empty()).then_some((from, to.as_ref()))
    }

    /// The save of one source that they describe.
    pub fn save(&self, from: &OsStr, to: &Path) -> dmafile::Result<Save<'static>> {
        Ok(Save::new(Origin::parse(from)?, to)
            .names(&crate::Options)
            .set_all(self.given.all())
            .set_all(self.tuning.all()))
    }

    /// The URL to save to. Options that are about files, and those about URLs without one, are refused.
    pub fn url(&self) -> Result<Option<&str>, crate::Failure> {
        let url = self.parts().and_then(|parts| remote::url(parts.1));
        let files = [
            (self.given.has(Opt::InPlace), "--offset"),
            (self.given.has(Opt::Sync), "--no-sync"),
            (self.tuning.has(Opt::Method), "--method"),
            (self.tuning.has(Opt::Io), "--io"),
            (self.tuning.has(Opt::Block), "--block"),
            (self.explain, "--explain"),
            (self.output.trace.is_some(), "--trace"),
        ];
        let urls = [
            (self.if_none_match, "--if-none-match"),
            (self.if_match.is_some(), "--if-match"),
        ];
        let (options, what) = match url {
            Some(_) => (&files[..], "is for saves to files"),
            None => (&urls[..], "is for saves to URLs"),
        };
        match options.iter().find(|option| option.0) {
            Some((_, option)) => Err(crate::Failure::usage(&format!("{option} {what}"))),
            None => Ok(url),
        }
    }

    /// The snapshot they describe; None for a save of one source to a file.
    pub fn snapshot(&self, sources: &[OsString], to: &Path) -> dmafile::Result<Option<Snapshot>> {
        // The name of a file may have an equals sign.
        let is_folder = match remote::url(to) {
            Some(url) => url.ends_with('/'),
            None => to.is_dir(),
        };
        let is_part = is_folder && named(&sources[0]).is_some();
        if sources.len() == 1 && !is_part {
            return Ok(None);
        }
        if self.if_none_match || self.if_match.is_some() {
            let why = "a snapshot replaces the one that was there when its save began";
            return Err(Error::usage("--if-none-match, --if-match", why));
        }
        let verify = self.given.parsed::<Verify>(Opt::Verify)?.pop();
        let expected = verify.as_ref().and_then(|verify| verify.expected.as_ref());
        let refused = [
            (
                self.given.has(Opt::InPlace),
                Opt::InPlace,
                "the sources of a snapshot are always saved as new files",
            ),
            (
                self.given.has(Opt::Length),
                Opt::Length,
                "the sources of a snapshot are always saved to their ends",
            ),
            (
                expected.is_some(),
                Opt::Verify,
                "a snapshot has a digest for each source: leave out =HEX",
            ),
        ];
        if let Some((_, option, why)) = refused.into_iter().find(|option| option.0) {
            return Err(Error::usage(option, why));
        }
        let mut snapshot = Snapshot::new(to)
            .names(&crate::Options)
            .sync(!self.given.has(Opt::Sync));
        for from in sources {
            let wrong = |why| {
                let from = from.to_string_lossy();
                let why = format!(
                    "'{from}' {why}: several sources make a snapshot in the folder DEST, each SRC=NAME"
                );
                Error::usage(Opt::From, why)
            };
            let (source, name) = named(from).ok_or_else(|| wrong("has no name"))?;
            let name = name
                .to_str()
                .ok_or_else(|| wrong("has a name that is not UTF-8"))?;
            snapshot = snapshot.add(name, Origin::parse(source)?);
        }
        if let Some(verify) = verify {
            snapshot = snapshot.verify(verify.algorithm);
        }
        let tuning = self.tuning.clone();
        Ok(Some(snapshot.each(move |_, save| {
            save.names(&crate::Options).set_all(tuning.all())
        })))
    }
}

/// The parts of SRC=NAME.
fn named(from: &OsStr) -> Option<(&OsStr, &OsStr)> {
    let bytes = from.as_bytes();
    let at = bytes.iter().rposition(|&byte| byte == b'=')?;
    let part = OsStr::from_bytes;
    Some((part(&bytes[..at]), part(&bytes[at + 1..])))
}

/// `dmafile show`
#[derive(Args, Debug)]
pub struct ShowArgs {
    /// A safetensors or GGUF file, a model's folder, a *.safetensors.index.json, the first file of a
    /// split GGUF, or the URL of one of these
    pub file: PathBuf,

    #[command(flatten)]
    pub given: OfShow,

    #[command(flatten)]
    pub urls: UrlArgs,

    /// Print the model as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `dmafile explain`
#[derive(Args, Debug)]
#[command(
    after_help = SHORT,
    after_long_help = "Here --to can also be cuda:N or hip:N, the memory of a GPU. For the plan of a save: \
                  dmafile save --explain.\n\n\
                  Sizes are powers of 1024: 4096, 512K, 8M, 1GiB."
)]
pub struct ExplainArgs {
    #[command(flatten)]
    pub options: LoadOptions,

    /// Print the plan as one JSON object
    #[arg(long, help_heading = OUTPUT)]
    pub json: bool,

    #[command(flatten)]
    pub tuning: HowToLoad,
}

/// `dmafile doctor`
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// A file or folder on the file system to check, or a URL
    #[arg(default_value = ".")]
    pub path: PathBuf,

    /// Print the checks as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `dmafile pins`
#[derive(Args, Debug)]
#[command(
    after_help = "BYTES is what the kernel counts for that kind of pin, so the same memory may appear in \
                  several lines: VmPin includes registered buffers and RDMA. `?` means unknown, and PID `-` \
                  that no visible process holds it. Limits are RLIMIT_MEMLOCK; registered buffers count \
                  against it per user, not per process.\n\n\
                  docs/pins.md says what each number means and where it comes from.",
    group(ArgGroup::new("lasting").args(["watch", "record"]))
)]
pub struct PinsArgs {
    /// Only what this process pins, or only pins of the memory of this file or memfd (/proc/PID/fd/N)
    /// [default: all processes that pin or lock memory]
    #[arg(value_name = "PID|FILE", value_parser = OsStringValueParser::new().try_map(subject))]
    pub subject: Option<Subject>,

    /// Show which pages are pinned now, which processes map them and which cgroup is charged; as root.
    /// Reads 16 MiB of kernel memory for each GiB
    #[arg(long, conflicts_with = "watch")]
    pub pages: bool,

    /// Count pins and unpins from now on, by process and call site in the kernel, for SECONDS or until
    /// Ctrl-C; as root. Adds probes to the kernel, and removes them again
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub watch: Option<Option<u32>>,

    /// With --watch and --record, also short pins such as those of direct I/O, each of which then costs a
    /// probe
    #[arg(long, requires = "lasting")]
    pub all: bool,

    /// Record who pins memory for a long time, from now on, by BPF programs in the kernel; as root. They go
    /// on when this command has ended; `dmafile pins` then names the owners
    #[arg(long, conflicts_with_all = ["pages", "blocked", "subject"])]
    pub record: bool,

    /// With --record: stop after TIME (`60s`, `10m`) or at Ctrl-C, after showing what is pinned then
    #[arg(long = "for", value_name = "TIME", value_parser = time, requires = "record")]
    pub record_for: Option<Duration>,

    /// With --record: stop the recording, and remove it from the kernel
    #[arg(long, requires = "record", conflicts_with_all = ["record_for", "memory", "all"])]
    pub stop: bool,

    /// With --record: kernel memory to use, from 64K [default: a thousandth of the machine's memory, at
    /// least 4M, at most 256M]
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "record")]
    pub memory: Option<u64>,

    /// List what recently could not be moved, and what held it; as root, on a kernel that tracks pins
    #[arg(long, conflicts_with_all = ["watch", "pages", "subject"])]
    pub blocked: bool,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Whose pins.
#[derive(Clone, Debug)]
pub enum Subject {
    Process(u32),
    File(PathBuf),
}

/// A number is a process; a file of that name is ./NUMBER.
fn subject(word: OsString) -> Result<Subject, &'static str> {
    match word.to_str() {
        Some(text) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => {
            let pid = text.parse().map_err(|_| "no process has that number")?;
            Ok(Subject::Process(pid))
        }
        _ => Ok(Subject::File(word.into())),
    }
}

/// `dmafile bench`
#[derive(Args, Debug)]
#[command(
    after_help = "Loads the file into a memfd by dmafile, by read() into a memfd, and by read() into \
                  private memory of huge pages: cold (nothing of it in the page cache) and warm (all \
                  of it). They run in shuffled order, at least 5 rounds, each run in a separate process \
                  whose memory was touched shortly before. The table shows medians with the smallest and \
                  largest values. Needs twice the file's size in memory."
)]
pub struct BenchArgs {
    /// The file to load [default: a temporary one]
    pub file: Option<PathBuf>,

    /// Size of the temporary file
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = size)]
    #[arg(conflicts_with = "file")]
    pub size: u64,

    /// The folder for the temporary file, on the disk to measure
    #[arg(long, value_name = "DIR", default_value = ".", conflicts_with = "file")]
    pub dir: PathBuf,

    /// Print facts, table and samples as one JSON object on stdout, or to PATH
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true)]
    pub json: Option<Option<PathBuf>>,

    /// Suppress text and progress (errors and JSON are still written)
    #[arg(long, short)]
    pub quiet: bool,
}

/// Parses a value with the engine, whose error gives the reason; clap names the option.
pub fn word<T: FromStr<Err = Error>>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|error: Error| error.why().render(&crate::Options))
}

/// Parses permissions in octal.
fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| mode & !0o777 == 0);
    mode.ok_or_else(|| "permissions are octal, 0 to 0777".to_string())
}

/// Parses a time: `500ms`, `60s`, `10m`, `2h`; a plain number is seconds.
fn time(text: &str) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| TIMES)?;
    let seconds = |of: u64| number.checked_mul(of).map(Duration::from_secs);
    let time = match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" | "" => seconds(1),
        "m" => seconds(60),
        "h" => seconds(3600),
        _ => None,
    };
    // A year, so that adding it to the current time cannot overflow.
    let most = Duration::from_secs(366 * 24 * 3600);
    time.filter(|time| *time <= most)
        .ok_or_else(|| TIMES.to_string())
}

const TIMES: &str = "write times as 500ms, 60s, 10m, 2h, at most a year";

/// Parses a size in powers of 1024: `4096`, `512K`, `8M`, `1GiB`.
pub fn size(text: &str) -> Result<u64, String> {
    if text.contains(['.', '-']) {
        return Err("a size is a whole number of bytes, K, M, G or T".to_string());
    }
    parse_size::Config::new()
        .with_binary()
        .parse_size(text)
        .map_err(|error| format!("{error}; write sizes as 4096, 512K, 8M, 1GiB"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_clap_definitions_are_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn times_have_units_and_modes_are_octal() {
        for (text, ms) in [
            ("500ms", 500),
            ("60s", 60_000),
            ("7", 7000),
            ("10m", 600_000),
            ("2h", 7_200_000),
        ] {
            assert_eq!(time(text).unwrap(), Duration::from_millis(ms), "{text}");
        }
        for text in [
            "",
            "s",
            "1.5s",
            "-1",
            "1d",
            "99999999999999999999",
            "9999999h",
        ] {
            time(text).unwrap_err();
        }
        assert_eq!(mode("0660").unwrap(), 0o660);
        for text in ["", "8", "1777", "-1"] {
            mode(text).unwrap_err();
        }
    }

    #[test]
    fn sizes_are_powers_of_1024() {
        for (text, bytes) in [
            ("4096", 4096),
            ("512K", 512 << 10),
            ("8M", 8 << 20),
            ("1GiB", 1 << 30),
            ("1MB", 1 << 20),
        ] {
            assert_eq!(size(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "x", "1.5M", "-1", "99999999999999999999", "4KK"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
