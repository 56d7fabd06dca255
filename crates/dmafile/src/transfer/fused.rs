//! A fused load: one call of dmafile.ko or a heap allocates the buffer and reads the file into it.
//!
//! It allocates chunk by chunk and reads each one while it allocates the next, as the pipeline of
//! [`LoadTransfer::run`] does in user space. Nothing else can access the buffer before it is complete.

use super::{LoadTask, Outcome};
use crate::buffer::{self, Filled};
use crate::error::{Error, Result};
use crate::flow::feed::Feed;
use crate::flow::meter::Phase;
use crate::flow::run::Run;
use crate::message::message;
use crate::method;
use crate::options::Allocation;
use crate::pump::Stop;
use crate::reasons::About;
use crate::verify::Verified;

/// Creates and fills the buffer of a plan for a fused load. None if that is refused, which is logged:
/// the memory must then be created first and filled afterwards.
pub(crate) fn fused(task: &LoadTask, run: &Run<'_>) -> Result<Option<(Box<dyn Filled>, Outcome)>> {
    let (plan, meter) = (&task.plan, &run.meter);
    let fd = match method::fused(plan, &task.source, run) {
        Ok(fd) => fd,
        Err(Stop::Failed(error)) => return Err(error),
        Err(Stop::Refused(error) | Stop::NotDirect(error)) => {
            let why = message!["cannot allocate and read in one call: ", &error];
            run.log.add(About::Allocation, Allocation::InRead, why);
            return Ok(None);
        }
    };
    let start = meter.now();
    let filled = buffer::adopt_fused(fd, plan).map_err(|error| error.at(plan.kind.to_string()))?;
    meter.add_step(Phase::Export, start);
    let outcome = Outcome {
        attempt: plan.first(),
        verified: task.verify(run, &*filled)?,
    };
    meter.tell_progress(true);
    Ok(Some((filled, outcome)))
}

impl LoadTask {
    /// Hashes memory that is already filled, as devices see it.
    fn verify(&self, run: &Run<'_>, filled: &dyn Filled) -> Result<Vec<Verified>> {
        if self.checks.is_empty() {
            return Ok(Vec::new());
        }
        let cannot = |errno| Error::os("cannot verify the buffer", errno);
        run.meter.in_place(0, self.at(self.plan.offset));
        filled.begin(false).map_err(cannot)?;
        let digests = self.hash(run, filled, &Feed::new([], [], self.cut(), None));
        filled.end(false);
        run.check(|| self.source.whole())?;
        self.check_digests(digests?)
    }
}
