//! A recorder, whose files are read as docs/recording.md describes them.

use super::{
    Fault, Kind, Operation, Run, Seen, Tools, Which, args, fault, nobody, nothing, plants, reads,
};
use crate::stage::RECORDS;
use crate::trace::Exit;
use crate::world::{self, Trust, World};
use std::fs;
use std::path::Path;

pub fn all() -> Vec<Operation> {
    vec![Operation {
        name: "record",
        trusts: &[
            Trust::Own,
            Trust::Group,
            Trust::Parent,
            Trust::Sticky,
            Trust::Foreign,
        ],
        no_tmpfile: false,
        finals: &["r.rec", "r.rec.1"],
        prepare: nothing,
        peers: nobody,
        command,
        script: reads,
        judge,
        again: None,
        second_ends: true,
        fails: false,
        leads: false,
        follows: false,
        weaves: true,
    }]
}

fn command(_: &Tools, world: &World, _: Which) -> Run {
    Run::own(args!["record", world.dir().join("r.rec")])
}

fn u32_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |four| u32::from_le_bytes(*four).into())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |eight| u64::from_le_bytes(*eight))
}

/// The records of one file, and whether its index ends; an error if one of them is not complete.
fn read(bytes: &[u8], first: u64) -> Result<(u64, bool), String> {
    if bytes.len() < 64 || &bytes[..8] != b"DMAFREC1" {
        return Ok((0, false));
    }
    let block = u32_at(bytes, 12) as usize;
    let identity = &bytes[16..32];
    let (mut at, mut records) = (u32_at(bytes, 56) as usize, 0);
    for index in 0.. {
        let Some(area) = bytes.get(at..at + block) else {
            break;
        };
        // The identity and the number stand for the checksum: this program writes no index block twice.
        if &area[..8] != b"DMAFIDX1" || &area[8..24] != identity || u64_at(area, 32) != index {
            break;
        }
        for entry in area[64..].chunks_exact(64).take(u32_at(area, 48) as usize) {
            let number = u64_at(entry, 0);
            let (from, length) = (u64_at(entry, 8) as usize, u64_at(entry, 16) as usize);
            if number != first + records {
                return Err(format!("record {number} follows {records} others"));
            }
            if bytes.get(from..from + length) != Some(&world::record(number)[..]) {
                return Err(format!("record {number} is not complete"));
            }
            records += 1;
        }
        if u32_at(area, 28) & 1 != 0 {
            return Ok((records, true));
        }
        at = u64_at(area, 40) as usize;
    }
    Ok((records, false))
}

/// The complete records of a recording.
fn count(home: &Path) -> Result<u64, String> {
    let mut records = 0;
    for number in 0.. {
        let name = match number {
            0 => "r.rec".to_string(),
            number => format!("r.rec.{number}"),
        };
        let path = home.join(name);
        if !fs::symlink_metadata(&path).is_ok_and(|found| found.is_file()) {
            break;
        }
        let bytes = fs::read(path).map_err(|error| error.to_string())?;
        let (more, _) = read(&bytes, records)?;
        records += more;
    }
    Ok(records)
}

fn judge(seen: &mut Seen) -> Vec<Fault> {
    let mut faults = Vec::new();
    let text = String::from_utf8_lossy(&seen.log.out);
    let said = |word: &str| {
        let numbers = text.lines().filter_map(|line| line.strip_prefix(word));
        numbers
            .filter_map(|number| number.trim().parse::<u64>().ok())
            .max()
    };
    let (durable, finished) = (said("durable"), said("finished"));
    let mut counts = 0;
    for home in seen.world.homes() {
        match count(&home) {
            Ok(count) => counts = counts.max(count),
            Err(_) if plants(seen.action) => {}
            Err(why) => faults.push(fault(Kind::Incomplete, format!("{why}; {}", seen.exit))),
        }
    }
    let names = seen.touches_names() || seen.replaces_folder();
    // After a folder was replaced the files are in two of them, and no reader finds them all: then it must fail.
    let acknowledged = durable.max(finished).unwrap_or(0);
    if counts < acknowledged && !names {
        let what = format!("{acknowledged} records are acknowledged, {counts} are there");
        faults.push(fault(Kind::Lost, what));
    }
    if seen.exit == Exit::Status(0) && finished != Some(RECORDS) {
        faults.push(fault(Kind::Status, "status 0, and it has not finished"));
    }
    faults.extend(seen.leftovers(|name| name.starts_with("r.rec")));
    faults
}
