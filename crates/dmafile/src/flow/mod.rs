//! The data flow of one transfer: the extents still to be moved, how far the bytes are in place,
//! and when what happened.

pub(crate) mod clock;
pub(crate) mod feed;
pub(crate) mod meter;
mod overlap;
pub(crate) mod prefix;
pub(crate) mod run;
pub(crate) mod trace;
