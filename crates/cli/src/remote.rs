//! URLs. The crate `dmafile-remote` opens them; a command without it starts the program of that name, which is this
//! command with it.

use dmafile::internal::is_url;
use std::path::Path;

/// The URL that was given in place of a path.
pub(crate) fn url(path: &Path) -> Option<&str> {
    path.to_str().filter(|text| is_url(text))
}

#[cfg(feature = "remote")]
mod with {
    use crate::signals;
    use dmafile::{Model, ModelObject, RemoteObject, Result};
    use dmafile_remote::{OpenOptions, Remote};
    use std::sync::{Arc, LazyLock};

    static REMOTE: LazyLock<Remote> = LazyLock::new(|| {
        Remote::new(OpenOptions {
            cancel: signals::token(),
            ..OpenOptions::default()
        })
    });

    pub(crate) fn open(url: &str) -> Result<Arc<dyn RemoteObject>> {
        REMOTE.open(url)
    }

    pub(crate) fn open_model(url: &str) -> Result<Model> {
        REMOTE.open_model(url)
    }

    pub(crate) fn open_all(url: &str) -> Result<Vec<ModelObject>> {
        REMOTE.open_all(url)
    }

    /// The small files next to a model's weights, and their names.
    pub(crate) fn open_others(url: &str) -> Result<Vec<(String, Arc<dyn RemoteObject>)>> {
        REMOTE.open_others(url)
    }

    pub(crate) use dmafile_remote::is_collection;
}

#[cfg(feature = "remote")]
pub(crate) use with::{is_collection, open, open_all, open_model, open_others};

#[cfg(not(feature = "remote"))]
mod without {
    use crate::Failure;
    use dmafile::{Error, Model, ModelObject, RemoteObject, Result};
    use std::ffi::OsString;
    use std::os::unix::process::CommandExt;
    use std::path::Path;
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
        let own = std::env::current_exe().unwrap_or_default();
        let beside = own.with_file_name(PROGRAM);
        let program = if beside.exists() {
            &beside
        } else {
            Path::new(PROGRAM)
        };
        let error = Command::new(program)
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

    pub(crate) fn open_all(_: &str) -> Result<Vec<ModelObject>> {
        unavailable()
    }

    pub(crate) fn open_others(_: &str) -> Result<Vec<(String, Arc<dyn RemoteObject>)>> {
        unavailable()
    }

    pub(crate) fn is_collection(_: &str) -> bool {
        false
    }
}

#[cfg(not(feature = "remote"))]
pub(crate) use without::{become_program, is_collection, open, open_all, open_model, open_others};
