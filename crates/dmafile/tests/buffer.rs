//! A filled buffer: safe access, seals, and sending it to another process.

use dmafile::{About, Allocation, Buffer, Io, Kind, Load, Method, Pages};
use dmafile_testkit::{buffer_digest, cold, dir, file_digest};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const LEN: u64 = (3 << 20) + 123;

fn loaded(kind: Kind) -> (tempfile::TempDir, std::path::PathBuf, Buffer) {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    // Not hugetlb pages, which write(2) cannot change.
    let load = Load::new(&path).to(kind).pages(Pages::Base).offset(77);
    (dir, path, load.run().unwrap().buffer)
}

#[test]
fn only_private_or_sealed_memory_is_a_slice() {
    let (_dir, path, mut private) = loaded(Kind::Anon);
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(private.as_slice().unwrap(), &bytes[77..]);
    private.as_mut_slice().unwrap()[0] ^= 1;
    assert_eq!(private.as_slice().unwrap()[0], bytes[77] ^ 1);
    assert!(private.as_fd().is_none());
    assert_eq!(private.seal().unwrap_err().raw_os_error(), Some(95));

    let (_dir, path, mut shared) = loaded(Kind::Memfd);
    let bytes = std::fs::read(&path).unwrap();
    assert!(shared.as_slice().is_none() && shared.as_mut_slice().is_none());
    shared.seal().unwrap();
    assert_eq!(shared.as_slice().unwrap(), &bytes[77..]);
    assert!(shared.as_mut_slice().is_none());
}

#[test]
fn an_address_is_returned_only_if_access_cannot_fault() {
    let (_dir, _path, private) = loaded(Kind::Anon);
    assert_eq!(
        private.as_ptr(),
        private.as_slice().map(|bytes| bytes.as_ptr())
    );

    let (_dir, path, mut shared) = loaded(Kind::Memfd);
    assert!(shared.as_ptr().is_some());
    shared.seal().unwrap();
    assert_eq!(
        shared.as_ptr(),
        shared.as_slice().map(|bytes| bytes.as_ptr())
    );

    let fd = rustix::fs::memfd_create("mine", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, LEN).unwrap();
    let filled = Load::new(&path).to(Kind::fd(fd)).run().unwrap().buffer;
    assert!(filled.as_ptr().is_none(), "its owner may cut it short");
}

#[test]
fn the_access_guard_allows_only_the_bytes_of_the_buffer() {
    for kind in [
        Kind::Anon,
        Kind::Memfd,
        Kind::fd(dmafile_testkit::memfd(LEN)),
    ] {
        let (_dir, path, mut buffer) = loaded(kind);
        let (bytes, len) = (std::fs::read(&path).unwrap(), buffer.len());
        let mut access = buffer.access_mut().unwrap();
        let mut got = [0; 100];
        access.read_at(1000, &mut got).unwrap();
        assert_eq!(got, bytes[1077..1177]);
        access.write_at(1000, b"hello").unwrap();
        access.read_at(1000, &mut got[..5]).unwrap();
        assert_eq!(&got[..5], b"hello");
        for (offset, count) in [(len, 1), (len - 99, 100), (u64::MAX, 2)] {
            let error = access.read_at(offset, &mut got[..count]).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(22), "{error}");
        }
    }
}

#[test]
fn a_sealed_buffer_cannot_be_changed() {
    let (_dir, path, mut buffer) = loaded(Kind::Memfd);
    // The size is sealed from the start.
    let fd = buffer.as_fd().unwrap().try_clone_to_owned().unwrap();
    assert!(rustix::fs::ftruncate(&fd, 1).is_err());
    assert!(rustix::io::pwrite(&fd, b"x", 100).is_ok());
    buffer.seal().unwrap();
    assert!(rustix::io::pwrite(&fd, b"y", 100).is_err());
    assert!(buffer.access_mut().unwrap().write_at(0, b"y").is_err());
    // Only the byte that was written before the seal has changed.
    let mut bytes = std::fs::read(&path).unwrap().split_off(77);
    bytes[100 - buffer.offset() as usize] = b'x';
    assert_eq!(buffer.as_slice().unwrap(), bytes);
}

#[test]
fn sealing_fails_while_a_writable_mapping_exists() {
    let (_dir, path, mut buffer) = loaded(Kind::Memfd);
    let fd = buffer.as_fd().unwrap().try_clone_to_owned().unwrap();
    let map = unsafe {
        // SAFETY: a mapping of this test, never read, unmapped below.
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        mmap(
            std::ptr::null_mut(),
            4096,
            ProtFlags::WRITE,
            MapFlags::SHARED,
            &fd,
            0,
        )
        .unwrap()
    };
    let error = buffer.seal().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(16), "{error}");
    assert_eq!(buffer_digest(&buffer), file_digest(&path, 77, LEN - 77));
    // SAFETY: mapped above, and not used since.
    unsafe { rustix::mm::munmap(map, 4096).unwrap() };
    buffer.seal().unwrap();
}

/// The kernel waits for them, too, but not long enough for a busy machine.
#[test]
fn sealing_waits_for_page_references_of_others() {
    let (_dir, path, mut buffer) = loaded(Kind::Memfd);
    let (mut from, to) = std::io::pipe().unwrap();
    let fd = buffer.as_fd().unwrap();
    let page = unsafe {
        // SAFETY: a mapping of this test, unmapped below.
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        mmap(
            std::ptr::null_mut(),
            4096,
            ProtFlags::READ,
            MapFlags::SHARED,
            fd,
            0,
        )
        .unwrap()
    };
    let piece = libc::iovec {
        iov_base: page,
        iov_len: 4096,
    };
    // SAFETY: the page is mapped; the pipe references it until it is read from the pipe.
    let spliced = unsafe { libc::vmsplice(to.as_raw_fd(), &piece, 1, 0) };
    assert_eq!(spliced, 4096);
    // SAFETY: mapped above, and not used since.
    unsafe { rustix::mm::munmap(page, 4096).unwrap() };
    let reader = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(600));
        std::io::Read::read_exact(&mut from, &mut [0; 4096]).unwrap();
    });
    buffer.seal().unwrap();
    reader.join().unwrap();
    assert_eq!(buffer_digest(&buffer), file_digest(&path, 77, LEN - 77));
}

#[test]
fn a_memfd_of_the_caller_can_be_sealed_if_it_allows_seals() {
    let (_dir, path, mut buffer) = loaded(Kind::fd(dmafile_testkit::memfd(LEN)));
    buffer.seal().unwrap();
    assert_eq!(
        buffer.as_slice().unwrap(),
        &std::fs::read(&path).unwrap()[77..]
    );
    assert!(rustix::io::pwrite(buffer.as_fd().unwrap(), b"y", 100).is_err());
    let error = buffer.access_mut().unwrap().write_at(0, b"y").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(1), "{error}");

    let plain = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&plain, LEN).unwrap();
    let (_dir, path, mut buffer) = loaded(Kind::fd(plain));
    let error = buffer.seal().unwrap_err().to_string();
    assert!(error.contains("does not allow seals (EPERM)"), "{error}");
    assert_eq!(buffer_digest(&buffer), file_digest(&path, 77, LEN - 77));
}

#[test]
fn the_size_of_a_memfd_does_not_depend_on_the_method() {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    for method in [Method::Auto, Method::Threads] {
        for io in [Io::Direct, Io::Buffered] {
            for (offset, length) in [(0, 1000), (0, LEN), (77, 4096), (5000, LEN - 5000)] {
                // The size of a memfd of huge pages would be a multiple of them.
                let load = Load::new(&path).method(method).io(io).pages(Pages::Base);
                let load = load.offset(offset).length(length);
                let buffer = load.run().unwrap().buffer;
                let size = rustix::fs::fstat(buffer.as_fd().unwrap()).unwrap().st_size;
                let what = format!("{length} from {offset} by {method} {io}");
                assert_eq!(size as u64, buffer.offset() + length, "{what}");
                let digest = file_digest(&path, offset, length);
                assert_eq!(buffer_digest(&buffer), digest, "{what}");
            }
        }
    }
}

#[test]
fn a_buffer_is_sent_and_received_over_a_socket() {
    for seal in [false, true] {
        let (_dir, path, mut buffer) = loaded(Kind::Memfd);
        if seal {
            buffer.seal().unwrap();
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        buffer.send(&ours).unwrap();
        let offset = buffer.offset();
        drop(buffer);
        let received = Buffer::receive(&theirs).unwrap();
        assert_eq!((received.offset(), received.len()), (offset, LEN - 77));
        assert_eq!(buffer_digest(&received), file_digest(&path, 77, LEN - 77));
        assert_eq!(received.as_slice().is_some(), seal);
    }
}

#[test]
fn a_sent_memfd_is_an_open_file_of_its_own() {
    let (_dir, _, buffer) = loaded(Kind::Memfd);
    let (ours, theirs) = UnixStream::pair().unwrap();
    buffer.send(&ours).unwrap();
    let sent = dmafile_testkit::receive_fds(theirs.as_fd());
    buffer.send(&ours).unwrap();
    let received = Buffer::receive(&theirs).unwrap();
    let own = [
        buffer.as_fd().unwrap(),
        sent[0].as_fd(),
        received.as_fd().unwrap(),
    ];
    dmafile_testkit::are_independent(&own);
}

#[test]
fn invalid_messages_are_refused() {
    let receive = |message: &[u8], fd: Option<std::os::fd::BorrowedFd<'_>>| {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        match fd {
            Some(fd) => send_with(&ours, message, fd),
            None => ours.write_all(message).unwrap(),
        }
        drop(ours);
        Buffer::receive(&theirs).unwrap_err()
    };
    let message = |offset: u64, len: u64| {
        let parts = [
            b"dmafile1".as_slice(),
            &offset.to_le_bytes(),
            &len.to_le_bytes(),
        ];
        parts.concat()
    };
    let sealed = dmafile_testkit::memfd(8192);
    let seals = rustix::fs::SealFlags::SHRINK;
    rustix::fs::fcntl_add_seals(&sealed, seals).unwrap();
    let sealed = Some(sealed.as_fd());
    let loose = dmafile_testkit::memfd(8192);
    let dir = dir();
    let plain = std::fs::File::open(cold(dir.path(), 8192)).unwrap();
    let cases = [
        (message(0, 8192), None, "no descriptor"),
        (
            message(0, 8192),
            Some(loose.as_fd()),
            "not sealed against shrinking",
        ),
        (message(0, 8192), Some(plain.as_fd()), "not a memfd"),
        (message(0, 8193), sealed, "outside"),
        (message(u64::MAX, 2), sealed, "overflows"),
        (message(8192, 0), sealed, "empty"),
        (
            b"something else, 24 bytes".to_vec(),
            sealed,
            "not from dmafile",
        ),
        (b"short".to_vec(), sealed, "cannot receive"),
    ];
    for (message, fd, why) in cases {
        let error = receive(&message, fd).to_string();
        assert!(error.contains(why), "{error} should say {why}");
    }
}

/// Its pages may have any size, and dmafile does not probe it.
#[test]
fn the_page_size_of_existing_memory_is_reported_as_existing() {
    let dir = dir();
    let path = cold(dir.path(), 300_000);
    let filled = dmafile_testkit::dirty_memfd(1 << 20);
    let loaded = Load::new(&path).to(Kind::fd(filled)).run().unwrap();
    assert_eq!(loaded.report.pages, "existing");
    let mut reasons = loaded.report.reasons.iter();
    let why = reasons.find(|reason| reason.about == About::Pages).unwrap();
    assert_eq!(why.choice, "existing", "{why}");
}

/// The sender may punch holes into hugetlb memory, which returns the pages to the pool. If the pool is then
/// empty, accessing a mapping raises SIGBUS.
#[test]
fn received_hugetlb_pages_are_not_mapped_unless_sealed() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate};
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let huge = match rustix::fs::memfd_create("huge", flags) {
        Ok(huge) => huge,
        Err(errno) => return eprintln!("SKIP: no hugetlb memfd ({errno})"),
    };
    // This needs no page of the pool: the memfd is all holes.
    let page = dmafile_testkit::default_huge_page();
    ftruncate(&huge, (4_u64 << 20).next_multiple_of(page)).unwrap();
    fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let parts = [
        &b"dmafile1"[..],
        &5_u64.to_le_bytes(),
        &(3_u64 << 20).to_le_bytes(),
    ];
    send_with(&ours, &parts.concat(), huge.as_fd());
    let mut received = Buffer::receive(&theirs).unwrap();
    assert!(received.as_ptr().is_none() && received.as_slice().is_none());
    let mut bytes = [7; 100];
    received
        .access()
        .unwrap()
        .read_at(1 << 20, &mut bytes)
        .unwrap();
    assert_eq!(bytes, [0; 100]);
    // Writing takes a page of the pool. If there is none, it is an error, not a signal.
    let mut access = received.access_mut().unwrap();
    match access.write_at(1 << 20, &[9; 100]) {
        Ok(()) => {
            access.read_at(1 << 20, &mut bytes).unwrap();
            assert_eq!(bytes, [9; 100]);
        }
        Err(error) => assert_eq!(error.raw_os_error(), Some(12), "{error}"),
    }
    drop(access);
    // The sender can prevent sealing (F_SEAL_SEAL); then its pages may still disappear.
    fcntl_add_seals(&huge, SealFlags::SEAL).unwrap();
    received.seal().unwrap_err();
    assert!(received.as_ptr().is_none() && received.as_slice().is_none());
    received
        .access()
        .unwrap()
        .read_at(1 << 20, &mut bytes)
        .unwrap();
}

fn send_with(socket: &UnixStream, message: &[u8], fd: std::os::fd::BorrowedFd<'_>) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let fds = [fd];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let iov = [std::io::IoSlice::new(message)];
    sendmsg(socket, &iov, &mut control, SendFlags::empty()).unwrap();
}

#[test]
fn a_descriptor_outlives_its_buffer() {
    let (_dir, path, buffer) = loaded(Kind::Memfd);
    let offset = buffer.offset();
    let fd = buffer.into_fd().unwrap();
    let digest = dmafile_testkit::descriptor_digest(fd, offset, LEN - 77);
    assert_eq!(digest, file_digest(&path, 77, LEN - 77));
}

#[test]
fn memory_of_the_caller_is_filled_in_place() {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let bytes = std::fs::read(&path).unwrap();
    dmafile_testkit::evict(&path);
    // Several misalignments of memory and file; the memory is dirty and larger than needed.
    for skew in [0, 1, 77, 512, 4096 - 77] {
        for offset in [0_u64, 77, 512, 4096, 5000] {
            let wanted = &bytes[offset as usize..];
            let mut memory = vec![0xff; wanted.len() + 4096 + 5000];
            let skew = memory.as_ptr().align_offset(4096) + skew;
            let target = &mut memory[skew..];
            let report = Load::new(&path).offset(offset).run_into(target).unwrap();
            assert_eq!(report.bytes, wanted.len() as u64);
            assert!(target.starts_with(wanted), "skew {skew}, offset {offset}");
            assert!(target[wanted.len()..].iter().all(|&byte| byte == 0));
            assert!(
                memory[..skew].iter().all(|&byte| byte == 0xff),
                "wrote before the memory"
            );
        }
    }
    let mut exact = vec![0xff; LEN as usize];
    Load::new(&path).run_into(&mut exact).unwrap();
    assert_eq!(exact, bytes);
    let error = Load::new(&path).run_into(&mut exact[1..]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(22), "{error}");
}

#[test]
fn equally_misaligned_memory_is_read_into_directly() {
    let dir = dir();
    let len = 9 << 20;
    let path = cold(dir.path(), len);
    let bytes = std::fs::read(&path).unwrap();
    dmafile_testkit::evict(&path);
    let mut memory = vec![0xff; len + 4096];
    // Several block sizes: the first and the last bytes share a block with other bytes.
    for block in [4 << 10, 1 << 20, 4 << 20] {
        for offset in [100_u64, 4095, 5000] {
            memory.fill(0xff);
            let page = memory.as_ptr().align_offset(4096);
            let skew = page + (offset % 4096) as usize;
            let wanted = &bytes[offset as usize..];
            let (before, rest) = memory.split_at_mut(skew);
            let (target, behind) = rest.split_at_mut(wanted.len());
            let report = Load::new(&path)
                .offset(offset)
                .block(block)
                .run_into(target)
                .unwrap();
            assert!(target == wanted, "offset {offset}, blocks of {block}");
            assert!(report.bytes_direct >= wanted.len() as u64 - 8192);
            let around = before.iter().chain(behind.iter());
            assert!(around.copied().all(|byte| byte == 0xff), "wrote beyond");
        }
    }
}

#[test]
fn aligned_memory_of_the_caller_is_read_into_directly() {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let mut memory = vec![0xff; LEN as usize + 4096];
    let skew = memory.as_ptr().align_offset(4096);
    let report = Load::new(&path).run_into(&mut memory[skew..]).unwrap();
    // All but the last partial block: the memory has no room to round up.
    assert!(
        report.bytes_direct >= LEN - 4096,
        "{} bytes came directly",
        report.bytes_direct
    );
}

#[test]
fn a_descriptor_of_the_caller_keeps_its_number() {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let fd = dmafile_testkit::memfd(LEN);
    let number = fd.as_raw_fd();
    let dup = fd.try_clone().unwrap();
    let buffer = Load::new(&path).to(Kind::fd(fd)).run().unwrap().buffer;
    assert_eq!(buffer.as_fd().unwrap().as_raw_fd(), number);
    assert_eq!(
        dmafile_testkit::descriptor_digest(dup, 0, LEN),
        file_digest(&path, 0, LEN)
    );
    let again = Load::new(&path)
        .to(Kind::fd(dmafile_testkit::memfd(LEN - 1)))
        .run()
        .unwrap_err();
    assert_eq!(again.raw_os_error(), Some(22), "{again}");
    // With O_APPEND, writes go to the end, whatever the offset.
    let appending = dmafile_testkit::memfd(LEN);
    rustix::fs::fcntl_setfl(&appending, rustix::fs::OFlags::APPEND).unwrap();
    let refused = Load::new(&path).to(Kind::fd(appending)).run().unwrap_err();
    assert!(refused.to_string().contains("O_APPEND"), "{refused}");
    let huge = Load::new(&path)
        .to(Kind::fd(dmafile_testkit::memfd(LEN)))
        .pages(Pages::Huge)
        .run();
    assert_eq!(huge.unwrap_err().kind(), dmafile::ErrorKind::Usage);
}

#[test]
fn memory_that_its_owner_truncates_during_a_load_raises_no_signal() {
    let dir = dir();
    let len = 8 << 20;
    let path = cold(dir.path(), len as usize);
    for method in [Method::Bounce, Method::Threads, Method::Uring] {
        // It is not sealed against shrinking.
        let fd = rustix::fs::memfd_create("mine", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let owner = fd.try_clone().unwrap();
        let cutting = std::thread::spawn(move || {
            // Until the other end is dropped, also by a panic.
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                for (size, moment) in [(4096, 300), (len, 2000)] {
                    rustix::fs::ftruncate(&owner, size).unwrap();
                    std::thread::sleep(std::time::Duration::from_micros(moment));
                }
            }
        });
        for _ in 0..40 {
            dmafile_testkit::evict(&path);
            let fd = fd.try_clone().unwrap();
            let load = Load::new(&path).to(Kind::fd(fd)).method(method);
            // All bytes or an error; a SIGBUS would have ended this process.
            match load.io(Io::Direct).block(64 << 10).run() {
                Ok(loaded) => assert_eq!(loaded.report.bytes, len),
                Err(error) => assert!(error.raw_os_error().is_some(), "{error}"),
            }
        }
        drop(stop);
        cutting.join().unwrap();
    }
}

#[test]
fn a_load_into_memory_that_its_owner_truncated_is_an_error() {
    let dir = dir();
    let len = 64 << 20;
    let path = cold(dir.path(), len as usize);
    for method in dmafile_testkit::methods() {
        dmafile_testkit::evict(&path);
        let fd = rustix::fs::memfd_create("mine", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        let owner = fd.try_clone().unwrap();
        let early = Arc::new(AtomicBool::new(false));
        let cut = Arc::clone(&early);
        // At an unaligned offset, so that bounce buffers are used too.
        let load = Load::new(&path).to(Kind::fd_at(fd, 1)).method(method);
        let io = match method {
            Method::Auto | Method::Bounce => Io::Direct,
            _ => Io::Buffered,
        };
        let load = load.io(io).block(64 << 10).queue_depth(2).length(len - 1);
        let loaded = load
            .allocation(Allocation::InRead)
            .progress(move |progress| {
                if progress.done < progress.total / 2 {
                    rustix::fs::ftruncate(&owner, 4096).unwrap();
                    cut.store(true, Ordering::Relaxed);
                }
            });
        match loaded.run() {
            Ok(_) => assert!(
                !early.load(Ordering::Relaxed),
                "{method}: handed out as whole"
            ),
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.contains("EFAULT") || text.contains("truncated it"),
                    "{text}"
                );
            }
        }
    }
}

#[test]
fn concurrent_loads_into_parts_of_one_memfd_do_not_overlap() {
    let dir = dir();
    let (len, parts) = (4 << 20, 4);
    let files: Vec<_> = (0..parts)
        .map(|part| cold(dir.path(), len as usize + part as usize))
        .collect();
    for method in dmafile_testkit::methods() {
        let fd = dmafile_testkit::memfd(parts * len);
        std::thread::scope(|scope| {
            for (part, path) in (0..).zip(&files) {
                let fd = fd.try_clone().unwrap();
                scope.spawn(move || {
                    let load = Load::new(path)
                        .to(Kind::fd_at(fd, part * len))
                        .method(method);
                    load.length(len).block(64 << 10).run().unwrap();
                });
            }
        });
        for (part, path) in (0..).zip(&files) {
            let got = dmafile_testkit::descriptor_digest(fd.try_clone().unwrap(), part * len, len);
            assert_eq!(got, file_digest(path, 0, len), "{method}, part {part}");
        }
    }
}
