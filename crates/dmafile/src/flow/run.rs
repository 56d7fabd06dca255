//! How far a load or a save is: what all of its threads share.

use super::clock::Clock;
use super::meter::Meter;
use crate::control::CancelToken;
use crate::error::{Error, Result, Verb};
use crate::reasons::Reasons;
use crate::request::Common;

/// One load or save while it runs.
pub(crate) struct Run<'a> {
    pub verb: Verb,
    pub meter: Meter<'a>,
    pub cancel: &'a CancelToken,
    pub log: &'a Reasons,
}

impl<'a> Run<'a> {
    /// One in which nothing has happened yet. `ordered`: its meter tracks how far the bytes are in place without a gap.
    pub(crate) fn of(
        verb: Verb,
        common: &'a Common,
        clock: &Clock,
        log: &'a Reasons,
        ordered: bool,
    ) -> Self {
        let progress = common.progress.as_ref();
        Self {
            verb,
            meter: Meter::new(clock.begin, common.trace, ordered, progress),
            cancel: &common.cancel,
            log,
        }
    }

    /// The error of a cancelled run, at this place.
    pub(crate) fn check(&self, place: impl FnOnce() -> String) -> Result<()> {
        if self.cancel.is_cancelled() {
            Err(Error::cancelled(self.verb, place()))
        } else {
            Ok(())
        }
    }
}
