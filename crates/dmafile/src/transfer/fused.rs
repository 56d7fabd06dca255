//! A fused load: one call of dmafile.ko or a heap allocates the buffer and reads the file into it.
//!
//! It allocates chunk by chunk and reads each one while it allocates the next, as the pipeline of
//! [`LoadTransfer::run`] does in user space. Nothing else can access the buffer before it is complete.

use super::{Outcome, Work};
use crate::buffer::{self, Filled};
use crate::error::{Error, Result, Verb};
use crate::flow::feed::Feed;
use crate::flow::meter::Phase;
use crate::message::message;
use crate::method::{self, Fused, Stop};
use crate::options::Allocation;
use crate::verify::Verified;

/// Creates and fills the buffer of a plan for a fused load. None if that is refused, which is logged:
/// the memory must then be created first and filled afterwards.
pub(crate) fn fused(work: &Work<'_>) -> Result<Option<(Box<dyn Filled>, Outcome)>> {
    let Work {
        plan,
        source,
        meter,
        cancel,
        ..
    } = *work;
    let call = Fused {
        plan,
        source,
        meter,
        cancel,
        in_order: plan.allocation == Allocation::Before,
    };
    let fd = match method::fused(&call) {
        Ok(fd) => fd,
        Err(Stop::Failed(error)) => return Err(error),
        Err(Stop::Refused(error) | Stop::NotDirect(error)) => {
            let why = message!["cannot allocate and read in one call: ", &error];
            work.log.add("allocation", Allocation::InRead, why);
            return Ok(None);
        }
    };
    let start = meter.now();
    let filled = buffer::adopt_fused(fd, plan).map_err(|error| error.at(&plan.kind))?;
    meter.add_step(Phase::Export, start);
    let outcome = Outcome {
        attempt: plan.first(),
        verified: work.verify(&*filled)?,
    };
    meter.tell_progress(true);
    Ok(Some((filled, outcome)))
}

impl Work<'_> {
    /// Hashes memory that is already filled, as devices see it.
    fn verify(&self, filled: &dyn Filled) -> Result<Vec<Verified>> {
        if self.checks.is_empty() {
            return Ok(Vec::new());
        }
        let cannot = |errno| Error::os("cannot verify the buffer", errno);
        self.meter.in_place(0, self.at(self.plan.offset));
        filled.begin(false).map_err(cannot)?;
        let digests = self.hash(filled, &Feed::new([], [], self.cut(), None));
        filled.end(false);
        if self.cancel.is_cancelled() {
            return Err(Error::cancelled(Verb::Load, self.source.whole()));
        }
        self.judge(digests?)
    }
}
