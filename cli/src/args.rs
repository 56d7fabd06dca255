//! The arguments. Completions and the man page come from these definitions.

use clap::{Args, Parser, Subcommand};
use dmafile::{Allocation, Error, Io, Kind, Load, Method, Model, Pages, Pattern, Verify};
use std::ffi::OsString;
use std::path::PathBuf;

/// Moves large files straight between disk and memory that devices can share.
#[derive(Debug, Parser)]
#[command(name = "dmafile", version, arg_required_else_help = true)]
#[command(after_help = "Exit status: 0 done, 1 failed, 2 bad usage, 130 interrupted.")]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Load a file into memory, and hand it to a command
    Load(LoadArgs),
    /// List the tensors of a model; reads headers only
    Show(ShowArgs),
    /// Print the plan for a load and the reason for each choice; moves nothing
    Explain(ExplainArgs),
    /// Print what this machine can do, what it can't, and the command that would fix it
    Doctor(DoctorArgs),
    /// Print what is pinned, by whom, against which limit
    Pins(PinsArgs),
    /// Measure the ways of loading on this machine, side by side (of the Python package)
    #[command(disable_help_flag = true)]
    Bench {
        /// Its own; `dmafile bench --help` lists them
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "ARG"
        )]
        args: Vec<OsString>,
    },
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page (roff)
    Man,
}

/// How a file should come into memory.
#[derive(Args, Debug)]
pub struct Knobs {
    /// A regular file or a block device; or a model of several files: its folder, its
    /// *.safetensors.index.json, or the first file of a split GGUF
    pub file: PathBuf,

    /// Kind of memory: anon, memfd, udmabuf, heap:NAME, dmafile; dma-buf, the best of the last three
    /// that works here; fd:N, which exists, or fd:N@OFFSET, a part of it
    #[arg(long, value_name = "KIND", default_value = "memfd")]
    pub to: String,

    /// Load only these tensors of a model: a name, a glob, or re: and a regular expression (repeat
    /// for more)
    #[arg(long, value_name = "PATTERN", value_parser = word::<Pattern>)]
    pub tensor: Vec<Pattern>,

    /// Size of its pages: auto, 4k, thp, huge
    #[arg(long, value_name = "P", default_value = "auto", value_parser = word::<Pages>)]
    pub pages: Pages,

    /// How bytes move: auto, uring, threads, read, mmap, bounce, sendfile, splice, module,
    /// copy-file-range, heap-read
    #[arg(long, value_name = "M", default_value = "auto", value_parser = word::<Method>)]
    pub method: Method,

    /// Past or through the page cache: auto, direct, buffered
    #[arg(long, value_name = "MODE", default_value = "auto", value_parser = word::<Io>)]
    pub io: Io,

    /// First byte that is wanted [default: 0]
    #[arg(long, value_name = "N", value_parser = size)]
    pub offset: Option<u64>,

    /// How many bytes are wanted [default: to the end of the file]
    #[arg(long, value_name = "N", value_parser = size)]
    pub length: Option<u64>,

    /// How much is allocated before its reads begin, at least a block [default: 128M]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub gather: Option<u64>,

    /// Size of one operation, 4K to 64M, a multiple of the file's direct alignment
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub block: Option<u64>,

    /// Operations in flight, 1 to 4096
    #[arg(long, value_name = "N")]
    pub queue_depth: Option<u32>,

    /// When pages come into being: auto, ahead of the reads, in-read, or all before the first read
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = word::<Allocation>)]
    pub allocation: Allocation,

    /// Compute a checksum, and compare it: crc32c, xxh3, blake3, sha256
    #[arg(long, value_name = "ALGO[=HEX]", value_parser = word::<Verify>)]
    pub verify: Option<Verify>,

    /// Load even what exceeds available memory or a cgroup's limit
    #[arg(long)]
    pub no_memory_check: bool,
}

impl Knobs {
    /// What is to be loaded: bytes of a file, or a model.
    fn source(&self) -> dmafile::Result<Load> {
        let range = self.offset.is_some() || self.length.is_some();
        if range && !self.tensor.is_empty() {
            let why = "the bytes of tensors are known: leave --offset and --length away";
            return Err(Error::usage("--tensor", why));
        }
        if range || (self.tensor.is_empty() && !dmafile::is_collection(&self.file)) {
            // A range is one of the file that is named.
            return Ok(Load::new(&self.file));
        }
        let model = Model::open(&self.file)?;
        match &self.tensor[..] {
            [] => Ok(model.load()),
            chosen => model.load_only(chosen),
        }
    }

    /// The load they describe.
    pub fn load(&self) -> dmafile::Result<Load> {
        let mut load = self
            .source()?
            .to(self.to.parse::<Kind>()?)
            .pages(self.pages)
            .method(self.method)
            .io(self.io)
            .allocation(self.allocation)
            .check_memory(!self.no_memory_check);
        if let Some(offset) = self.offset {
            load = load.offset(offset);
        }
        if let Some(length) = self.length {
            load = load.length(length);
        }
        if let Some(gather) = self.gather {
            load = load.gather(gather);
        }
        if let Some(block) = self.block {
            load = load.block(block);
        }
        if let Some(depth) = self.queue_depth {
            load = load.queue_depth(depth);
        }
        if let Some(verify) = &self.verify {
            load = load.verify(verify.clone());
        }
        Ok(load)
    }
}

/// `dmafile load`
#[derive(Args, Debug)]
#[command(
    after_help = "COMMAND inherits the buffer: DMAFILE_FD its descriptor, DMAFILE_BYTES how \
                        many bytes are in it, DMAFILE_OFFSET where they start. It is exec'd in place: its \
                        exit status is ours; 127 when it is not found, 126 when it can't be run.\n\n\
                        The files of a model lie one behind the other in the buffer, a tensor \
                        where `dmafile show --json` says (at), whether all are loaded or some.\n\n\
                        Sizes read 4096, 512K, 8M, 1GiB: powers of 1024."
)]
pub struct LoadArgs {
    #[command(flatten)]
    pub knobs: Knobs,

    /// Write a timeline that Perfetto opens (Chrome trace format)
    #[arg(long, value_name = "OUT.json")]
    pub trace: Option<PathBuf>,

    /// Print the report as one JSON object on stdout, or to PATH
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true)]
    pub json: Option<Option<PathBuf>>,

    /// No text and no progress; errors and JSON remain
    #[arg(long, short)]
    pub quiet: bool,

    /// A command to hand the buffer to
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// `dmafile show`
#[derive(Args, Debug)]
pub struct ShowArgs {
    /// A safetensors or GGUF file, a model's folder, a *.safetensors.index.json, or the first file
    /// of a split GGUF
    pub file: PathBuf,

    /// Show only these tensors: a name, a glob, or re: and a regular expression (repeat for more)
    #[arg(long, value_name = "PATTERN", value_parser = word::<Pattern>)]
    pub tensor: Vec<Pattern>,

    /// Print the model as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `dmafile explain`
#[derive(Args, Debug)]
pub struct ExplainArgs {
    #[command(flatten)]
    pub knobs: Knobs,

    /// Print the plan as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `dmafile doctor`
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// A file or folder whose file system is looked at
    #[arg(default_value = ".")]
    pub path: PathBuf,

    /// Print the checks as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `dmafile pins`
#[derive(Args, Debug)]
#[command(
    after_help = "PINNED is VmPin of /proc/PID/status, LOCKED is VmLck. BUFFERS and REGISTERED are \
                  those of its io_uring rings, `?` where they can't be looked at. LIMIT is \
                  RLIMIT_MEMLOCK; registered buffers count against it by user, not by process.\n\n\
                  docs/pins.md says what each number means and where it comes from."
)]
pub struct PinsArgs {
    /// A process, whatever it pins [default: all that pin or lock memory]
    pub pid: Option<u32>,

    /// Print it as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Parses a word of the engine; its error says what the choices are.
fn word<T: std::str::FromStr<Err = dmafile::Error>>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|error: dmafile::Error| error.render(&crate::Options))
}

/// Parses a size in powers of 1024: `4096`, `512K`, `8M`, `1GiB`.
fn size(text: &str) -> Result<u64, String> {
    if text.contains(['.', '-']) {
        return Err("a size is a whole number of bytes, K, M, G or T".to_string());
    }
    parse_size::Config::new()
        .with_binary()
        .parse_size(text)
        .map_err(|error| format!("{error}; sizes read 4096, 512K, 8M, 1GiB"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn definitions_are_sound() {
        Cli::command().debug_assert();
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
