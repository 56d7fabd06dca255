//! Loads from object stores and web servers, straight into memory that devices can share.
//!
//! [`open`] turns a URL into a [`RemoteObject`](dmafile::RemoteObject). A load of it receives each part where it
//! belongs, over several connections, while later memory is being allocated.
//!
//! ```no_run
//! use dmafile::Load;
//!
//! let object = dmafile_remote::open("https://host/model.safetensors", &Default::default())?;
//! let loaded = Load::of_object(object).run()?;
//! # Ok::<(), dmafile::Error>(())
//! ```
//!
//! An object that is replaced during a load is never mixed: every request names the version that the first one saw
//! (`If-Match`). What fails on the way is tried again from the byte that was reached.

#![forbid(unsafe_code)]

mod answer;
mod http;
mod object;
mod retry;

pub use object::{HttpObject, OpenOptions, open};

/// Returns `true` for what [`open`] accepts: a URL with one of its schemes.
pub fn is_url(text: &str) -> bool {
    SCHEMES.iter().any(|scheme| {
        let rest = text.get(..scheme.len());
        rest.is_some_and(|start| start.eq_ignore_ascii_case(scheme))
            && text[scheme.len()..].starts_with("://")
    })
}

const SCHEMES: [&str; 2] = ["https", "http"];

/// What the fuzz targets call.
#[cfg(fuzzing)]
pub mod fuzz {
    pub use crate::http::fuzz::head;
}
