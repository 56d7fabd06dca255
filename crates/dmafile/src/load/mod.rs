//! The load request, as a builder.

mod report;
mod run;

use crate::control::{CancelToken, Progress};
use crate::error::Result;
use crate::message::{Names, Opt};
use crate::options::{Allocation, Io, Kind, Method, OptionValue, Pages};
use crate::plan::Plan;
use crate::request::{Common, Request, Selection, common_setters};
use crate::source::{RemoteObject, Source};
use crate::verify::Verify;
use std::path::PathBuf;
use std::sync::Arc;

pub use report::{Extent, Loaded, Report};

type LoadPlanFn = Box<dyn FnOnce(&Plan) + Send>;

/// Where the bytes come from.
enum LoadOrigin {
    Path(PathBuf),
    Open(Arc<Source>),
    Object(OpenObject),
}

/// Opens an object; the token cancels that.
type OpenObject = Box<dyn Fn(&CancelToken) -> Result<Arc<dyn RemoteObject>> + Send + Sync>;

impl LoadOrigin {
    fn open(&self, cancel: &CancelToken) -> Result<Arc<Source>> {
        match self {
            Self::Path(path) => Source::open(path).map(Arc::new),
            Self::Open(source) => Ok(Arc::clone(source)),
            Self::Object(open) => {
                let object = open(cancel)?;
                let path = PathBuf::from(object.name());
                Source::of_objects(&path, vec![object]).map(Arc::new)
            }
        }
    }
}

/// A builder for a load: a file, and how to load it.
///
/// ```no_run
/// use dmafile::{CancelToken, Io, Kind, Load, Pages};
///
/// let token = CancelToken::new();
/// let loaded = Load::new("model.gguf")
///     .to(Kind::Anon)
///     .pages(Pages::Thp)
///     .io(Io::Direct)
///     .offset(4096)
///     .length(1 << 20)
///     .cancel(token.clone())
///     .progress(|progress| eprintln!("{} of {}", progress.done, progress.total))
///     .run()?;
/// let bytes: &[u8] = loaded.buffer.as_slice().expect("private memory");
/// # Ok::<(), dmafile::Error>(())
/// ```
#[must_use = "nothing is loaded before `run` or `run_into`"]
pub struct Load {
    origin: LoadOrigin,
    request: Request,
    common: Common,
    on_plan: Option<LoadPlanFn>,
    parse_kind: fn(&str) -> Result<Kind>,
}

impl Load {
    /// Loads the whole file at `path` into a memfd; the plan chooses everything else.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self::with_origin(LoadOrigin::Path(path.into()))
    }

    /// As [`Load::new`], for an object instead of a file.
    pub fn of_object(object: Arc<dyn RemoteObject>) -> Self {
        Self::of_object_from(move |_| Ok(Arc::clone(&object)))
    }

    /// As [`Load::of_object`], for an object that `open` opens when the load begins, and that the load's token cancels
    /// ([`Load::cancel`]).
    pub fn of_object_from(
        open: impl Fn(&CancelToken) -> Result<Arc<dyn RemoteObject>> + Send + Sync + 'static,
    ) -> Self {
        Self::with_origin(LoadOrigin::Object(Box::new(open)))
    }

    /// A load of files that are already open.
    #[doc(hidden)]
    pub fn of(source: Arc<Source>, selection: Selection) -> Self {
        let mut load = Self::with_origin(LoadOrigin::Open(source));
        load.request.selection = selection;
        load
    }

    /// Returns true if it loads everything that its origin has.
    #[doc(hidden)]
    pub fn is_whole(&self) -> bool {
        self.request.is_whole()
    }

    /// The requested kind of memory.
    #[doc(hidden)]
    pub fn kind(&self) -> &Kind {
        &self.request.kind
    }

    fn with_origin(origin: LoadOrigin) -> Self {
        Self {
            origin,
            request: Request::default(),
            common: Common::default(),
            on_plan: None,
            parse_kind: str::parse,
        }
    }

    common_setters!(request);

    fn set_to(&mut self, option: Opt, value: &OptionValue) -> Result<()> {
        let request = &mut self.request;
        match option {
            Opt::To => request.kind = value.parse_by(option, self.parse_kind)?,
            Opt::Pages => request.pages = value.parse(option)?,
            Opt::Offset => request.offset = value.number(option)?,
            Opt::Length => request.length = Some(value.number(option)?),
            Opt::Chunk => request.chunk = Some(value.number(option)?),
            Opt::Limit => request.limit = Some(value.number(option)?),
            Opt::Allocation => request.allocation = value.parse(option)?,
            Opt::CheckMemory => request.check_memory = value.flag(option)?,
            _ => self.common.set(&mut request.how, option, value)?,
        }
        Ok(())
    }

    /// The kind of memory; default [`Kind::Memfd`].
    pub fn to(mut self, kind: Kind) -> Self {
        self.request.kind = kind;
        self
    }

    /// Sets what parses a kind of memory that is given to [`Load::set`] from then on, for crates that have kinds of
    /// their own; default [`Kind::from_str`](std::str::FromStr::from_str).
    pub fn kinds(mut self, parse: fn(&str) -> Result<Kind>) -> Self {
        self.parse_kind = parse;
        self
    }

    /// The page size; default [`Pages::Auto`].
    pub fn pages(mut self, pages: Pages) -> Self {
        self.request.pages = pages;
        self
    }

    /// Sets whether a memfd must end where the bytes end, as programs expect that open it as a file.
    /// [`Pages::Auto`] then does not use hugetlb pages, because they would round its size up. Default
    /// false.
    pub fn exact_size(mut self, exact: bool) -> Self {
        self.request.exact_size = exact;
        self
    }

    /// First byte of the file to load; default 0.
    pub fn offset(mut self, bytes: u64) -> Self {
        self.request.offset = bytes;
        self
    }

    /// Number of bytes to load, at least 1; default: up to the end of the file.
    pub fn length(mut self, bytes: u64) -> Self {
        self.request.length = Some(bytes);
        self
    }

    /// Maximum size of a chunk in bytes. Memory is allocated in chunks, each while the previous one is
    /// being read; the first and the last ones are smaller. At least one block; default
    /// [`DEFAULT_CHUNK`](crate::DEFAULT_CHUNK).
    pub fn chunk(mut self, bytes: u64) -> Self {
        self.request.chunk = Some(bytes);
        self
    }

    /// The most to read or receive in a second, in bytes, at least 65536, on average; default: no limit. Methods in which
    /// the kernel moves all bytes in one call are left out.
    pub fn limit(mut self, bytes_per_second: u64) -> Self {
        self.request.limit = Some(bytes_per_second);
        self
    }

    /// When pages are allocated; default [`Allocation::Auto`].
    pub fn allocation(mut self, allocation: Allocation) -> Self {
        self.request.allocation = allocation;
        self
    }

    /// Sets whether to refuse a load that exceeds available memory or a cgroup's limit early; default true.
    pub fn check_memory(mut self, check: bool) -> Self {
        self.request.check_memory = check;
        self
    }

    /// Checks everything that depends neither on the file nor on this machine: that values are in
    /// range, and that options do not exclude each other. [`Load::plan`] and [`Load::run`] do this
    /// first.
    ///
    /// # Errors
    /// Kind [`Usage`](crate::ErrorKind::Usage).
    pub fn check(&self) -> Result<()> {
        self.common.check()?;
        self.request.check()
    }

    /// Calls `show` with the plan, before any byte is moved.
    pub fn on_plan(mut self, show: impl FnOnce(&Plan) + Send + 'static) -> Self {
        self.on_plan = Some(Box::new(show));
        self
    }
}
