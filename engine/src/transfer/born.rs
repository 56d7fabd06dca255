//! A buffer that is born full: memory and bytes come into being in one step, of dmafile.ko.
//!
//! It allocates gather by gather and reads each one while it allocates the next, as the pipeline of
//! [`Transfer::run`] does in user space, and nobody else sees the buffer before it is whole.

use super::feed::Feed;
use super::{Outcome, Transfer};
use crate::CancelToken;
use crate::buffer::{self, Memory};
use crate::error::{Error, Result};
use crate::facts::Layout;
use crate::method::{self, Birth, Stop};
use crate::options::Allocation;
use crate::plan::{Plan, Reason};
use crate::source::Source;
use crate::transfer::meter::{Meter, Phase};
use crate::verify::{Check, Verified};

/// Makes and fills the buffer of a plan that says so. None where that is refused, with the reason: the
/// memory is then to be made and filled one after the other.
pub(crate) fn born(
    plan: &Plan,
    layout: &Layout,
    source: &Source,
    meter: &Meter<'_>,
    cancel: &CancelToken,
    checks: &[Check],
    reasons: &mut Vec<Reason>,
) -> Result<Option<(Box<dyn Memory>, Outcome)>> {
    let birth = Birth {
        plan,
        source,
        meter,
        cancel,
        in_order: plan.allocation == Allocation::Before,
    };
    let fd = match method::born(&birth) {
        Ok(fd) => fd,
        Err(Stop::Failed(error)) => return Err(error),
        Err(Stop::Refused(error) | Stop::NotDirect(error)) => {
            reasons.push(Reason {
                about: "allocation",
                choice: Allocation::InRead.to_string(),
                why: format!("not in one step with the reads: {error}"),
            });
            return Ok(None);
        }
    };
    let start = meter.now();
    let memory = buffer::born(fd, plan).map_err(|error| error.at(&plan.kind))?;
    meter.add_step(Phase::Export, start);
    let transfer = Transfer {
        plan,
        layout,
        source,
        memory: &*memory,
        meter,
        cancel,
        checks,
    };
    let outcome = Outcome {
        rung: plan.first(),
        reasons: Vec::new(),
        verified: transfer.verify()?,
    };
    Ok(Some((memory, outcome)))
}

impl Transfer<'_> {
    /// Hashes what is there already, as devices see it.
    fn verify(&self) -> Result<Vec<Verified>> {
        if self.checks.is_empty() {
            return Ok(Vec::new());
        }
        let cannot = |errno| Error::os("cannot verify the buffer", errno);
        self.meter.in_place(0, self.at(self.plan.offset));
        self.memory.begin(false).map_err(cannot)?;
        let digests = self.hash(&Feed::new([], [], self.cut(), None));
        self.memory.end(false);
        if self.cancel.is_set() {
            return Err(Error::cancelled(self.source.whole()));
        }
        self.judge(digests?)
    }
}
