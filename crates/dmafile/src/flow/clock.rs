//! When a transfer began, in wall-clock and CPU time, and the CPU time it has used.

use crate::sys::usage;
use serde::Serialize;
use std::time::{Duration, Instant};

/// The start of a transfer.
pub struct Clock {
    /// When it began.
    pub begin: Instant,
    cpu: (Duration, Duration),
}

impl Clock {
    /// Starts it now.
    pub fn start() -> Self {
        Self {
            begin: Instant::now(),
            cpu: usage::cpu(),
        }
    }

    /// CPU time of the process since then.
    pub fn cpu(&self) -> Cpu {
        let (user, system) = usage::cpu();
        Cpu {
            user: user.saturating_sub(self.cpu.0).as_secs_f64(),
            system: system.saturating_sub(self.cpu.1).as_secs_f64(),
        }
    }
}

/// CPU time of the whole process during a load or a save, in seconds.
#[derive(Clone, Copy, Debug, Serialize)]
#[non_exhaustive]
pub struct Cpu {
    /// In user space.
    pub user: f64,
    /// In the kernel.
    pub system: f64,
}
