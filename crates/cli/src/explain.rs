//! `dmafile explain`

use crate::args::ExplainArgs;
use crate::output::{write_json, write_stdout};
use crate::{Failure, text};
use dmafile::Ring;
use dmafile_gpu::Device;

pub(crate) fn run(args: &ExplainArgs) -> Result<u8, Failure> {
    args.options.look_in_cache()?;
    if let Some((snapshot, folder)) = args.options.snapshot(&args.tuning, false)? {
        let plan = match folder {
            Some(folder) => snapshot.plan_from(&*folder)?,
            None => snapshot.plan()?,
        };
        return if args.json {
            write_json(&plan)
        } else {
            write_stdout(text::snapshot_load_plan(&plan).as_bytes())
        };
    }
    let plan = match args.options.to().parse::<Device>() {
        // Only Python and C load into the memory of a GPU.
        Ok(device) => {
            let load = args.options.load_elsewhere(&args.tuning)?;
            load.plan_through(Ring::default(), &device)?
        }
        Err(_) => args.options.load(&args.tuning)?.plan()?,
    };
    if args.json {
        return write_json(&plan);
    }
    write_stdout(text::plan(&plan).as_bytes())
}
