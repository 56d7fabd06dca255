//! How far a load or a save is: what all of its threads share.

use super::meter::Meter;
use crate::control::CancelToken;
use crate::error::{Error, Result, Verb};
use crate::reasons::Reasons;

/// One load or save while it runs.
pub(crate) struct Run<'a> {
    pub verb: Verb,
    pub meter: Meter<'a>,
    pub cancel: &'a CancelToken,
    pub log: &'a Reasons,
}

impl Run<'_> {
    /// The error of a cancelled run, at this place.
    pub(crate) fn check(&self, place: impl FnOnce() -> String) -> Result<()> {
        if self.cancel.is_cancelled() {
            Err(Error::cancelled(self.verb, place()))
        } else {
            Ok(())
        }
    }
}
