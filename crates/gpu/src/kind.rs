//! Words for memory that is pinned for a GPU, beside those of the core.

use crate::device::Device;
use dmafile::{Kind, Operation, Opt, OptionInfo, OptionType, Result};
use std::sync::LazyLock;

const WORDS: &[&str] = &["cuda-host", "hip-host"];
const DETAILS: &str = "; `cuda-host`, `cuda-host:N`, `hip-host`, `hip-host:N` (a memfd that is pinned for a GPU while it \
    is filled).";

/// Parses `cuda-host`, `cuda-host:N`, `hip-host`, `hip-host:N`, and what [`Kind`] parses itself: for
/// [`Load::kinds`](dmafile::Load::kinds).
///
/// # Errors
/// As [`Kind`].
pub fn parse_kind(text: &str) -> Result<Kind> {
    match Device::of_host_word(text) {
        Some(device) => Ok(device.into()),
        None => Kind::parse_beside(WORDS, text),
    }
}

/// As [`OptionInfo::all`], with these words for kinds of memory.
pub fn options(of: Operation) -> impl Iterator<Item = &'static OptionInfo> {
    static TO: LazyLock<Option<OptionInfo>> = LazyLock::new(|| {
        let mut to = *OptionInfo::all(Operation::Load).find(|info| info.option == Opt::To)?;
        if let OptionType::Text(words) = to.accepts {
            to.accepts = OptionType::Text([words, WORDS].concat().leak());
        }
        to.details = (to.details.trim_end_matches('.').to_string() + DETAILS).leak();
        Some(to)
    });
    OptionInfo::all(of).map(|info| match (info.option, &*TO) {
        (Opt::To, Some(to)) => to,
        _ => info,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmafile::{ErrorKind, Load};

    #[test]
    fn kinds_are_parsed_strictly() {
        for word in [
            "memfd",
            "heap:system",
            "cuda-host",
            "cuda-host:1",
            "hip-host",
            "hip-host:1",
        ] {
            let kind = parse_kind(word).unwrap();
            assert_eq!(kind.to_string(), word);
            assert_eq!(kind.memory().to_string(), word);
        }
        for word in ["cuda-host:", "cuda-host:x", "cuda:0-host", "cuda", "heap:"] {
            let error = parse_kind(word).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{word}");
        }
        assert_eq!(
            parse_kind("vram").unwrap_err().to_string(),
            "to: 'vram' is not one of anon, memfd, fd:N, udmabuf, heap:NAME, module, dma-buf, \
             cuda-host, hip-host"
        );
    }

    #[test]
    fn each_kind_of_the_list_is_accepted() {
        let to = options(Operation::Load).find(|info| info.option == Opt::To);
        let Some(OptionType::Text(words)) = to.map(|to| to.accepts) else {
            panic!("{to:?}");
        };
        assert!(WORDS.iter().all(|word| words.contains(word)), "{words:?}");
        for word in words {
            let load = Load::new("file").kinds(parse_kind).set(Opt::To, *word);
            load.check().unwrap();
        }
        let without = Load::new("file").set(Opt::To, WORDS[0]);
        assert!(without.check().is_err());
    }
}
