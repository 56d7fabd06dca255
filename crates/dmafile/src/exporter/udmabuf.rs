//! `/dev/udmabuf`, which creates dma-bufs over memfds.

use crate::error::{Error, Result};
use crate::message::{Opt, message};
use crate::options::Kind;
use crate::sys::{Errno, dmabuf};
use std::os::fd::OwnedFd;

/// Opens the node.
pub(crate) fn open() -> Result<OwnedFd> {
    dmabuf::open_udmabuf().map_err(|errno| {
        let error = Error::os("cannot create the buffer", errno);
        match errno {
            Errno::NOENT | Errno::NXIO | Errno::NODEV => error
                .with_why("there is no /dev/udmabuf")
                .with_remedy(message![
                    "modprobe udmabuf (CONFIG_UDMABUF; in a container, on its host), or ",
                    Opt::To.set(Kind::Memfd)
                ]),
            _ => error
                .with_why("/dev/udmabuf cannot be opened")
                .with_remedy("ask for access to it: usermod -aG kvm USER, or a udev rule"),
        }
    })
}
