//! `dmafile explain`

use crate::args::ExplainArgs;
use crate::output::{write_json, write_stdout};
use crate::{Failure, text};

pub(crate) fn run(args: &ExplainArgs) -> Result<u8, Failure> {
    if let Some(snapshot) = args.knobs.snapshot(&args.tuning, false)? {
        let plan = snapshot.plan()?;
        return match args.json {
            true => write_json(&plan),
            false => write_stdout(text::snapshot_load_plan(&plan).as_bytes()),
        };
    }
    let plan = args.knobs.load(&args.tuning)?.plan()?;
    if args.json {
        return write_json(&plan);
    }
    write_stdout(text::plan(&plan).as_bytes())
}
