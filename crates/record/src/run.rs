//! A recording in progress. Appends give records their places, in order; worker threads write them; the
//! keeper thread acknowledges what is written, in order.

use super::file::Writing;
use super::format::{Ends, FileHeader, RecordEntry};
use super::{Note, RecorderBuffer, RecorderOptions, WhenFull, now};
use dmafile::internal::{
    Verb, folder::Folder, part::PartOptions, part::folder_of, sync::lock, sync::wait,
    sync::wait_for,
};
use dmafile::{Error, Result};
use dmafile_sys::{Errno, host};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Maximum number of unacknowledged records: the keeper syncs before there are more.
const MOST_UNSETTLED: u64 = 4096;
/// How much space is reserved ahead of the last record, in bytes.
const READY: u64 = 32 << 20;

/// Counts of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recorded {
    /// Records appended.
    pub records: u64,
    /// Bytes of these records.
    pub bytes: u64,
    /// Records acknowledged: the first `durable` ones survive a crash.
    pub durable: u64,
    /// Buffers dropped.
    pub dropped: u64,
    /// Files of the recording.
    pub files: u32,
}

/// Appends buffers to a file as devices fill them. Any thread may append. Dropping it finishes the
/// recording, but cannot report an error. A forked child has neither its threads nor any use for it: there
/// it and its tickets return EINVAL, and dropping them does nothing.
pub struct Recorder {
    shared: Arc<RecorderShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// A record that was appended.
#[derive(Clone)]
pub struct Ticket {
    shared: Arc<RecorderShared>,
    number: u64,
}

struct RecorderShared {
    /// The process that has the threads.
    process: u32,
    options: RecorderOptions,
    how: PartOptions,
    folder: Folder,
    recording: [u8; 16],
    state: Mutex<RecorderState>,
    /// Something in the state has changed.
    changed: Condvar,
}

struct RecorderState {
    /// Appended, and not being written yet.
    queue: VecDeque<Item>,
    /// Being written.
    writing: u32,
    /// The files that are not finished: the last one takes new records.
    files: VecDeque<FileSpace>,
    /// Records from the first unacknowledged one on.
    slots: VecDeque<QueueSlot>,
    /// The first record that is not written, or that follows one that is not.
    written: u64,
    /// A thread waits until all records before this one are acknowledged.
    wanted: u64,
    counts: Recorded,
    failed: Option<Error>,
    /// No more appends are accepted.
    closing: bool,
    /// The keeper has ended: nothing more will be acknowledged.
    over: bool,
    /// Space is being reserved.
    reserving: bool,
}

/// A file, and how much of its space is assigned.
struct FileSpace {
    file: Arc<Writing>,
    end: u64,
    /// The number of its first record, and the number after its last one when it takes no more.
    first: u64,
    last: Option<u64>,
    since: Instant,
}

struct Item {
    number: u64,
    buffer: RecorderBuffer,
    at: u64,
    length: u64,
    file: Arc<Writing>,
    offset: u64,
}

struct QueueSlot {
    entry: RecordEntry,
    done: Option<Result<()>>,
}

impl Recorder {
    pub(super) fn start(options: RecorderOptions) -> Result<Self> {
        let folder = folder_of(&options.path)?;
        let second = options.name_of(1);
        let name = second.file_name().unwrap_or_default();
        if (options.rotate_bytes.is_some() || options.rotate_after.is_some())
            && !matches!(folder.look_up(name), Ok(None))
        {
            return Err(Error::os(Verb::Record, Errno::EXIST)
                .with_why("the second file of the recording already exists")
                .at(second.display().to_string())
                .with_remedy("remove it, or record to another file"));
        }
        let shared = Arc::new(RecorderShared {
            process: std::process::id(),
            how: options.how(),
            options,
            folder,
            recording: host::random(),
            state: Mutex::new(RecorderState {
                queue: VecDeque::new(),
                writing: 0,
                files: VecDeque::new(),
                slots: VecDeque::new(),
                written: 0,
                wanted: 0,
                counts: Recorded::default(),
                failed: None,
                closing: false,
                over: false,
                reserving: false,
            }),
            changed: Condvar::new(),
        });
        let mut state = lock(&shared.state);
        shared.open_file(&mut state)?;
        let first = Arc::clone(&state.files[0].file);
        drop(state);
        let begun = first.begin(&shared.folder);
        let recorder = Self {
            shared,
            threads: Mutex::default(),
        };
        let started = begun.and_then(|()| recorder.start_threads());
        if let Err(error) = started {
            recorder.shared.fail(&error);
            first.growing.remove(&recorder.shared.folder);
            return Err(error);
        }
        Ok(recorder)
    }

    fn start_threads(&self) -> Result<()> {
        let mut threads = lock(&self.threads);
        let mut start = |name: String, run: fn(&RecorderShared)| {
            let shared = Arc::clone(&self.shared);
            let spawned = std::thread::Builder::new()
                .name(name)
                .spawn(move || {
                    // Also on a panic: nothing may wait for work that this thread will not do.
                    let _end = ThreadGuard(&shared);
                    run(&shared);
                })
                .map_err(|error| {
                    let errno = dmafile_sys::errno(error);
                    Error::os("cannot start the recorder's thread", errno)
                });
            threads.push(spawned?);
            Ok(())
        };
        start("dmafile-keep".to_string(), RecorderShared::keep)?;
        for worker in 0..self.shared.options.in_flight {
            start(format!("dmafile-rec-{worker}"), RecorderShared::work)?;
        }
        Ok(())
    }

    /// Appends `length` bytes of a buffer, starting at byte `at`; `None` if it was dropped. The bytes must
    /// not change until the ticket says that they are written.
    ///
    /// # Errors
    /// EINVAL for a range outside the buffer, and after [`Recorder::finish`]; ENOSPC, EDQUOT and EFBIG if
    /// there is no room for it, after which the recording continues as if the append had not been made;
    /// otherwise the error of an earlier write.
    pub fn append(
        &self,
        buffer: &RecorderBuffer,
        at: u64,
        length: u64,
        note: Note,
    ) -> Result<Option<Ticket>> {
        let shared = &self.shared;
        shared.check(buffer, at, length)?;
        let mut state = shared.own_state()?;
        loop {
            let taken = shared.take_if_room(&mut state, buffer, (at, length), note)?;
            if taken.is_some() {
                return Ok(taken);
            }
            if shared.options.when_full == WhenFull::Drop {
                state.counts.dropped += 1;
                return Ok(None);
            }
            state = wait(&shared.changed, state);
        }
    }

    /// As [`Recorder::append`]; `None` if it would have to wait, which does not count as a drop.
    ///
    /// # Errors
    /// As [`Recorder::append`].
    pub fn try_append(
        &self,
        buffer: &RecorderBuffer,
        at: u64,
        length: u64,
        note: Note,
    ) -> Result<Option<Ticket>> {
        let shared = &self.shared;
        shared.check(buffer, at, length)?;
        shared.take_if_room(&mut *shared.own_state()?, buffer, (at, length), note)
    }

    /// Waits until an append need not wait, or will return an error; false on timeout.
    pub fn wait_for_room(&self, most: Duration) -> bool {
        let over = |state: &RecorderState| {
            self.shared.has_room(state) || state.failed.is_some() || state.closing
        };
        match self.shared.wait_until(Some(most), over) {
            Ok(state) => state.is_some(),
            Err(_) => true,
        }
    }

    /// Waits until all records appended before the call are acknowledged: a system crash does not lose
    /// them.
    ///
    /// # Errors
    /// The error of a write or the sync; the records before it are acknowledged.
    pub fn sync(&self) -> Result<()> {
        let number = self.shared.own_state()?.counts.records;
        self.shared.settled(number, None).map(drop)
    }

    /// The ticket of a record; `None` if no record has this number.
    pub fn ticket(&self, number: u64) -> Option<Ticket> {
        (number < self.recorded().records).then(|| Ticket {
            shared: Arc::clone(&self.shared),
            number,
        })
    }

    /// The counts of the recording so far; zeros in a forked child.
    pub fn recorded(&self) -> Recorded {
        let state = self.shared.own_state();
        state.map_or_else(|_| Recorded::default(), |state| state.counts.clone())
    }

    /// Ends the recording: accepts no more records, waits until everything is on the disk, releases the
    /// reserved space, and marks the recording as complete. Can be called again, with the same result.
    ///
    /// # Errors
    /// As [`Recorder::sync`]. The recording is not marked as complete then.
    pub fn finish(&self) -> Result<Recorded> {
        let mut state = self.shared.own_state()?;
        state.closing = true;
        self.shared.changed.notify_all();
        drop(state);
        let mut threads = lock(&self.threads);
        for thread in threads.drain(..) {
            // A thread that panicked has already marked the recording as failed.
            let _ = thread.join();
        }
        drop(threads);
        let mut state = lock(&self.shared.state);
        // Closed, so that others can open them.
        state.files.clear();
        match &state.failed {
            Some(error) => Err(error.clone()),
            None => Ok(state.counts.clone()),
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if self.shared.is_here() {
            let _ = self.finish();
        } else {
            // The threads are the parent's: they can neither be joined nor detached.
            let threads = self
                .threads
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(threads));
        }
    }
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Recorder({}, {:?})",
            self.shared.options.path.display(),
            self.recorded()
        )
    }
}

impl Ticket {
    /// The number of the record, from 0.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns `true` if it is written, or has failed: nothing reads the buffer any more.
    pub fn is_written(&self) -> bool {
        let state = self.shared.own_state();
        state.is_ok_and(|state| state.is_settled(self.number))
    }

    /// Waits until it is written: the buffer can be reused. A crash may still lose the record.
    ///
    /// # Errors
    /// The error of its write.
    pub fn wait(&self) -> Result<()> {
        self.wait_for(None).map(drop)
    }

    /// As [`Ticket::wait`], at most this long if `most` is not `None`; false on timeout.
    ///
    /// # Errors
    /// As [`Ticket::wait`].
    pub fn wait_for(&self, most: Option<Duration>) -> Result<bool> {
        let number = self.number;
        let over = |state: &RecorderState| state.is_settled(number);
        match self.shared.wait_until(most, over)? {
            Some(state) => state.outcome(number).map(|()| true),
            None => Ok(false),
        }
    }

    /// Returns `true` if it is acknowledged.
    pub fn is_durable(&self) -> bool {
        let state = self.shared.own_state();
        state.is_ok_and(|state| state.counts.durable > self.number)
    }

    /// Acknowledges it and all records before it, and waits for that, at most this long if `most` is not
    /// `None`; false on timeout.
    ///
    /// # Errors
    /// As [`Recorder::sync`].
    pub fn wait_durable(&self, most: Option<Duration>) -> Result<bool> {
        self.shared.settled(self.number + 1, most)
    }
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ticket({})", self.number)
    }
}

fn panicked() -> Error {
    Error::new(Verb::Record, "a thread of the recorder has panicked")
}

/// Marks the end of a thread when dropped.
struct ThreadGuard<'a>(&'a RecorderShared);

impl Drop for ThreadGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(&panicked());
            lock(&self.0.state).over = true;
        }
        self.0.changed.notify_all();
    }
}

impl RecorderState {
    /// True if it is written, or never will be.
    fn is_settled(&self, number: u64) -> bool {
        // After a panic there may be no thread left that would write it.
        let nothing_reads = self.over && self.writing == 0;
        nothing_reads || self.slot(number).is_none_or(|slot| slot.done.is_some())
    }

    /// None if it is acknowledged already.
    fn slot(&self, number: u64) -> Option<&QueueSlot> {
        let at = number.checked_sub(self.counts.durable)?;
        self.slots.get(at as usize)
    }

    fn outcome(&self, number: u64) -> Result<()> {
        match self.slot(number) {
            None => Ok(()),
            Some(slot) => {
                let never = || self.failed.clone().map_or(Ok(()), Err);
                slot.done.clone().unwrap_or_else(never)
            }
        }
    }

    /// Fails if no more may be appended.
    fn goes_on(&self, shared: &RecorderShared) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.closing {
            return Err(Error::os(Verb::Record, Errno::INVAL)
                .with_why("the recording is finished")
                .at(shared.options.path.display().to_string())
                .with_remedy("start another one"));
        }
        Ok(())
    }
}

impl RecorderShared {
    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    /// The locked state; EINVAL in a forked child, where a thread that does not exist may hold the lock.
    fn own_state(&self) -> Result<MutexGuard<'_, RecorderState>> {
        if self.is_here() {
            return Ok(lock(&self.state));
        }
        Err(Error::os(Verb::Record, Errno::INVAL)
            .with_why("the recorder belongs to the process that forked this one")
            .at(self.options.path.display().to_string())
            .with_remedy("start another one"))
    }

    fn check(&self, buffer: &RecorderBuffer, at: u64, length: u64) -> Result<()> {
        let bytes = buffer.bytes();
        if at.checked_add(length).is_some_and(|end| end <= bytes) {
            return Ok(());
        }
        let why = format!("{length} bytes from byte {at} on are past the end at byte {bytes}");
        Err(Error::os(Verb::Record, Errno::INVAL)
            .with_why(why)
            .at(buffer.0.name())
            .with_remedy("choose a range inside it"))
    }

    fn has_room(&self, state: &RecorderState) -> bool {
        state.queue.len() as u64 + u64::from(state.writing) < self.options.in_flight.into()
    }

    /// Waits until a condition is true, and returns the locked state; None on timeout. Fails in a forked child.
    fn wait_until(
        &self,
        most: Option<Duration>,
        over: impl Fn(&RecorderState) -> bool,
    ) -> Result<Option<MutexGuard<'_, RecorderState>>> {
        let until = most.and_then(|most| Instant::now().checked_add(most));
        let mut state = self.own_state()?;
        while !over(&state) {
            state = match until {
                None => wait(&self.changed, state),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(None);
                    }
                    wait_for(&self.changed, state, left)
                }
            };
        }
        Ok(Some(state))
    }

    /// Waits until all records before a number are acknowledged.
    fn settled(&self, number: u64, most: Option<Duration>) -> Result<bool> {
        let mut state = self.own_state()?;
        state.wanted = state.wanted.max(number);
        self.changed.notify_all();
        drop(state);
        let over = |state: &RecorderState| state.counts.durable >= number || state.over;
        let Some(state) = self.wait_until(most, over)? else {
            return Ok(false);
        };
        match &state.failed {
            Some(error) if state.counts.durable < number => Err(error.clone()),
            _ => Ok(true),
        }
    }

    /// Only the first failure is kept.
    fn fail(&self, error: &Error) {
        let mut state = lock(&self.state);
        state.failed.get_or_insert_with(|| error.clone());
        self.changed.notify_all();
    }

    /// Gives a record its place, if another may be in flight.
    fn take_if_room(
        self: &Arc<Self>,
        state: &mut RecorderState,
        buffer: &RecorderBuffer,
        range: (u64, u64),
        note: Note,
    ) -> Result<Option<Ticket>> {
        state.goes_on(self)?;
        let room = self.has_room(state);
        room.then(|| self.take(state, buffer, range, note))
            .transpose()
    }

    /// Gives a record its place.
    fn take(
        self: &Arc<Self>,
        state: &mut RecorderState,
        buffer: &RecorderBuffer,
        (at, length): (u64, u64),
        note: Note,
    ) -> Result<Ticket> {
        let number = state.counts.records;
        let place = state.files.back().expect("one file takes records");
        let blocks = place.file.blocks(length);
        let is_empty = place.first == number;
        let is_full = |most| place.end + blocks > most;
        let is_old = |time| place.since.elapsed() >= time;
        if !is_empty
            && (self.options.rotate_bytes.is_some_and(is_full)
                || self.options.rotate_after.is_some_and(is_old))
        {
            self.open_file(state)?;
        }
        let place = state.files.back_mut().expect("one file takes records");
        let offset = place.end;
        place.file.growing.reserve_ahead(offset + blocks)?;
        place.end = offset + blocks;
        let entry = RecordEntry {
            number,
            offset,
            length,
            timestamp: note.timestamp,
            tag: note.tag,
            dropped: state.counts.dropped,
            checksum: None,
        };
        let item = Item {
            number,
            buffer: buffer.clone(),
            at,
            length,
            file: Arc::clone(&place.file),
            offset,
        };
        state.slots.push_back(QueueSlot { entry, done: None });
        state.queue.push_back(item);
        state.counts.records += 1;
        state.counts.bytes += length;
        self.changed.notify_all();
        Ok(Ticket {
            shared: Arc::clone(self),
            number,
        })
    }

    /// Opens the next file, in which records go from now on.
    fn open_file(&self, state: &mut RecorderState) -> Result<()> {
        let (number, first) = (state.counts.files, state.counts.records);
        let header = FileHeader {
            block: 0,
            recording: self.recording,
            file: number,
            created: now(),
            first,
            index: 0,
        };
        let path: PathBuf = self.options.name_of(number);
        let file = Writing::create(&self.folder, &path, header)?;
        if let Some(last) = state.files.back_mut() {
            last.last = Some(first);
        }
        state.files.push_back(FileSpace {
            end: file.start(),
            file: Arc::new(file),
            first,
            last: None,
            since: Instant::now(),
        });
        state.counts.files += 1;
        Ok(())
    }

    /// A thread that writes records until there are no more.
    fn work(&self) {
        loop {
            let over = |state: &RecorderState| !state.queue.is_empty() || state.closing;
            let Ok(Some(mut state)) = self.wait_until(None, over) else {
                return;
            };
            let Some(item) = state.queue.pop_front() else {
                return;
            };
            state.writing += 1;
            let failed = state.failed.clone();
            drop(state);
            let number = item.number;
            let write = || {
                let done = match failed {
                    Some(error) => Err(error),
                    None => {
                        let (range, to) = ((item.at, item.length), &item.file.growing);
                        item.buffer.0.write(range, (to, item.offset), &self.how)
                    }
                };
                // The memory must be released before the ticket says so.
                drop(item);
                done
            };
            // The memory is a caller's, whose code may panic when it is released.
            match catch_unwind(AssertUnwindSafe(write)) {
                Ok(done) => self.landed(number, done),
                Err(cause) => {
                    self.landed(number, Err(panicked()));
                    resume_unwind(cause);
                }
            }
            self.make_ready();
        }
    }

    fn landed(&self, number: u64, done: Result<Option<u32>>) {
        let mut state = lock(&self.state);
        state.writing -= 1;
        if let Err(error) = &done {
            state.failed.get_or_insert_with(|| error.clone());
        }
        let at = (number - state.counts.durable) as usize;
        let slot = &mut state.slots[at];
        slot.entry.checksum = done.as_ref().ok().copied().flatten();
        slot.done = Some(done.map(drop));
        while let Some(QueueSlot {
            done: Some(Ok(())), ..
        }) = state.slot(state.written)
        {
            state.written += 1;
        }
        self.changed.notify_all();
    }

    /// Reserves space ahead of the records, so that appends need not wait for it.
    fn make_ready(&self) {
        let mut state = lock(&self.state);
        let Some(place) = state.files.back().filter(|_| !state.reserving) else {
            return;
        };
        let (file, end) = (Arc::clone(&place.file), place.end);
        let most = self.options.rotate_bytes.unwrap_or(u64::MAX);
        if file.growing.reserved() >= (end + READY).min(most) {
            return;
        }
        state.reserving = true;
        drop(state);
        // If there is no space, the append that needs it reports the error.
        let _ = file.growing.reserve_ahead((end + READY).min(most));
        lock(&self.state).reserving = false;
    }

    /// The thread that acknowledges records, until all are.
    fn keep(&self) {
        let mut since = Instant::now();
        loop {
            let due = |state: &RecorderState| {
                let unsettled = state.written - state.counts.durable;
                let most = self.options.sync_every.unwrap_or(MOST_UNSETTLED);
                let asked = state.wanted > state.counts.durable && unsettled > 0;
                let old = self
                    .options
                    .sync_interval
                    .map(|time| since.elapsed() >= time);
                let rotated = state.files.front().and_then(|place| place.last);
                unsettled >= most.min(MOST_UNSETTLED)
                    || (asked && (state.written >= state.wanted || state.failed.is_some()))
                    || (old == Some(true) && unsettled > 0)
                    || rotated.is_some_and(|last| state.written >= last)
            };
            let ended = |state: &RecorderState| {
                let idle = state.queue.is_empty() && state.writing == 0;
                // A thread that panicked leaves records that will never be written.
                state.over || idle && (state.closing || state.failed.is_some())
            };
            let over = |state: &RecorderState| due(state) || ended(state);
            let left = self
                .options
                .sync_interval
                .map(|time| time.saturating_sub(since.elapsed()));
            let left = left.map(|left| left.max(Duration::from_millis(1)));
            let Ok(Some(state)) = self.wait_until(left, over) else {
                let unsettled = |state: &RecorderState| state.written > state.counts.durable;
                if !unsettled(&lock(&self.state)) {
                    since = Instant::now();
                }
                continue;
            };
            let (is_end, is_failed) = (ended(&state), state.failed.is_some());
            drop(state);
            since = Instant::now();
            let settled = self.settle(is_end && !is_failed);
            if let Err(error) = &settled {
                self.fail(error);
            }
            if is_end || settled.is_err() {
                break;
            }
        }
        lock(&self.state).over = true;
        self.changed.notify_all();
    }

    /// Acknowledges what is written; with `finish`, when everything is, permanently.
    fn settle(&self, finish: bool) -> Result<()> {
        loop {
            let state = lock(&self.state);
            let place = state.files.front().expect("the last file stays");
            let (file, end) = (Arc::clone(&place.file), place.last);
            let from = state.counts.durable;
            let upto = end.map_or(state.written, |end| end.min(state.written));
            let slots = state.slots.iter().take((upto - from) as usize);
            let entries: Vec<RecordEntry> = slots.map(|slot| slot.entry).collect();
            let ends = match end {
                Some(end) if end == upto => Ends::File,
                None if finish => Ends::Recording,
                _ => Ends::No,
            };
            drop(state);
            if entries.is_empty() && ends == Ends::No {
                return Ok(());
            }
            file.begin(&self.folder)?;
            file.settle(&entries, ends, |bytes| self.set_aside(&file, bytes))?;
            if ends != Ends::No {
                let places = lock(&self.state);
                let end = places.files.front().map_or(0, |place| place.end);
                drop(places);
                file.growing.end_at(end)?;
            }
            let mut state = lock(&self.state);
            state.slots.drain(..entries.len());
            state.counts.durable = upto;
            if ends == Ends::File {
                state.files.pop_front();
            }
            self.changed.notify_all();
            if ends != Ends::File {
                return Ok(());
            }
        }
    }

    /// Reserves a place for blocks of the index in a file.
    fn set_aside(&self, file: &Writing, bytes: u64) -> Result<u64> {
        let mut state = lock(&self.state);
        let places = state.files.iter_mut();
        let mut places = places.filter(|place| place.file.number() == file.number());
        let place = places.next().expect("it is not finished");
        let offset = place.end;
        place.file.growing.reserve_ahead(offset + bytes)?;
        place.end = offset + bytes;
        Ok(offset)
    }
}
