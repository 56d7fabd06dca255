//! Types of the running kernel, from `/sys/kernel/btf/vmlinux` (Documentation/bpf/btf.rst).
//!
//! Parsed here because only a few offsets are needed, and btf-rs (2.0) is under the LGPL.

use dmafile::{Error, Result};
use dmafile_sys::errno;
use std::fs;

const FILE: &str = "/sys/kernel/btf/vmlinux";
const MAGIC: u16 = 0xeb9f;
/// Maximum nesting of structures; the kernel's are not deeper.
const DEEPEST: u32 = 16;

// BTF_KIND_*
const INT: u8 = 1;
const ARRAY: u8 = 3;
const STRUCT: u8 = 4;
const UNION: u8 = 5;
const ENUM: u8 = 6;
const TYPEDEF: u8 = 8;
const VOLATILE: u8 = 9;
const CONST: u8 = 10;
const RESTRICT: u8 = 11;
#[cfg(feature = "bpf")]
const FUNC: u8 = 12;
const FUNC_PROTO: u8 = 13;
const VAR: u8 = 14;
const DATASEC: u8 = 15;
const DECL_TAG: u8 = 17;
const TYPE_TAG: u8 = 18;
const ENUM64: u8 = 19;

/// The types, with the offset of each.
pub(super) struct Btf {
    types: Vec<u8>,
    strings: Vec<u8>,
    starts: Vec<usize>,
}

/// The head of a type.
#[derive(Clone, Copy)]
struct Type {
    name: u32,
    kind: u8,
    /// Offsets of members have the size of a bit field in their upper bits.
    with_fields: bool,
    count: usize,
    size_or_type: u32,
    /// Offset of what follows the head.
    body: usize,
}

impl Btf {
    pub(super) fn read() -> Result<Self> {
        let failed = |error| Error::os("cannot read the kernel's types", errno(&error)).at(FILE);
        let bytes = fs::read(FILE).map_err(|error| {
            failed(error).with_remedy("use a kernel with CONFIG_DEBUG_INFO_BTF")
        })?;
        let broken = || Error::new("cannot read the kernel's types", "no BTF").at(FILE);
        Self::parse(&bytes).ok_or_else(broken)
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let number = |at| word(bytes, at).map(|word| word as usize);
        if u16::from_ne_bytes(*bytes.first_chunk()?) != MAGIC {
            return None;
        }
        let header = number(4)?;
        let part = |offset: usize, len: usize| {
            let start = header.checked_add(offset)?;
            bytes
                .get(start..start.checked_add(len)?)
                .map(<[u8]>::to_vec)
        };
        let mut btf = Self {
            types: part(number(8)?, number(12)?)?,
            strings: part(number(16)?, number(20)?)?,
            starts: Vec::new(),
        };
        let mut at = 0;
        while at < btf.types.len() {
            let head = btf.head(at)?;
            btf.starts.push(at);
            at = head.body
                + match head.kind {
                    INT | VAR | DECL_TAG => 4,
                    ARRAY => 12,
                    STRUCT | UNION | DATASEC | ENUM64 => 12 * head.count,
                    ENUM | FUNC_PROTO => 8 * head.count,
                    _ => 0,
                };
        }
        Some(btf)
    }

    fn head(&self, at: usize) -> Option<Type> {
        let info = word(&self.types, at + 4)?;
        Some(Type {
            name: word(&self.types, at)?,
            kind: (info >> 24 & 0x1f) as u8,
            with_fields: info >> 31 == 1,
            count: (info & 0xffff) as usize,
            size_or_type: word(&self.types, at + 8)?,
            body: at + 12,
        })
    }

    /// The type with this number; 0 is void.
    fn numbered(&self, number: u32) -> Option<Type> {
        let index = (number as usize).checked_sub(1)?;
        self.head(*self.starts.get(index)?)
    }

    /// The type at the end of a chain of typedefs and qualifiers.
    fn meant(&self, number: u32) -> Option<Type> {
        let mut kind = self.numbered(number)?;
        for _ in 0..DEEPEST {
            if !matches!(kind.kind, TYPEDEF | VOLATILE | CONST | RESTRICT | TYPE_TAG) {
                return Some(kind);
            }
            kind = self.numbered(kind.size_or_type)?;
        }
        None
    }

    fn is_called(&self, offset: u32, name: &str) -> bool {
        let found = self.strings.get(offset as usize..).unwrap_or_default();
        found
            .strip_prefix(name.as_bytes())
            .is_some_and(|rest| rest.first() == Some(&0))
    }

    fn structure(&self, name: &str) -> Option<Type> {
        let all = self.starts.iter().filter_map(|at| self.head(*at));
        let mut named = all.filter(|one| one.kind == STRUCT && self.is_called(one.name, name));
        named.next()
    }

    /// Size of `struct NAME` in bytes.
    pub(super) fn size(&self, name: &str) -> Option<u64> {
        Some(self.structure(name)?.size_or_type.into())
    }

    /// Offset of a member of `struct NAME` in bytes; members of unnamed parts are included.
    pub(super) fn offset(&self, name: &str, member: &str) -> Option<u64> {
        let bits = self.member(self.structure(name)?, member, DEEPEST)?;
        Some(bits / 8)
    }

    fn member(&self, of: Type, wanted: &str, deep: u32) -> Option<u64> {
        let deep = deep.checked_sub(1)?;
        for index in 0..of.count {
            let at = of.body + 12 * index;
            let name = word(&self.types, at)?;
            let place = word(&self.types, at + 8)?;
            let place = if of.with_fields {
                place & 0xff_ffff
            } else {
                place
            };
            if self.is_called(name, wanted) {
                return Some(place.into());
            }
            if name == 0 || self.is_called(name, "") {
                let inside = self.meant(word(&self.types, at + 4)?);
                let inside = inside.filter(|one| matches!(one.kind, STRUCT | UNION));
                if let Some(found) = inside.and_then(|one| self.member(one, wanted, deep)) {
                    return Some(u64::from(place) + found);
                }
            }
        }
        None
    }

    /// True if a function returns true or false; None if there is no such function.
    #[cfg(feature = "bpf")]
    pub(super) fn returns_bool(&self, function: &str) -> Option<bool> {
        let all = self.starts.iter().filter_map(|at| self.head(*at));
        let mut named = all.filter(|one| one.kind == FUNC && self.is_called(one.name, function));
        let prototype = self.numbered(named.next()?.size_or_type)?;
        let returned = self.meant(prototype.size_or_type);
        Some(returned.is_some_and(|one| one.kind == INT && self.is_called(one.name, "_Bool")))
    }

    /// The value of an enum constant.
    pub(super) fn constant(&self, name: &str) -> Option<u64> {
        for head in self.starts.iter().filter_map(|at| self.head(*at)) {
            let step = match head.kind {
                ENUM => 8,
                ENUM64 => 12,
                _ => continue,
            };
            for at in (0..head.count).map(|index| head.body + step * index) {
                if self.is_called(word(&self.types, at)?, name) {
                    let low = word(&self.types, at + 4)?;
                    let high = if step == 12 {
                        word(&self.types, at + 8)?
                    } else {
                        0
                    };
                    return Some(u64::from(high) << 32 | u64::from(low));
                }
            }
        }
        None
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `struct page { long flags; union { struct { int lru; int count; }; int field:3; }; }` and
    /// `enum { LONGTERM = 256 }`.
    fn made() -> Vec<u8> {
        let mut strings = vec![0_u8];
        let mut name = |text: &str| {
            let at = strings.len() as u32;
            strings.extend(text.bytes().chain([0]));
            at
        };
        let info = |kind: u32, count: u32, fields: u32| fields << 31 | kind << 24 | count;
        let types: Vec<u32> = [
            // 1: int, 2: long
            &[name("int"), info(1, 0, 0), 4, 32][..],
            &[name("long"), info(1, 0, 0), 8, 64],
            // 3: struct { int lru; int count; }
            &[0, info(4, 2, 0), 8, name("lru"), 1, 0, name("count"), 1, 32],
            // 4: const of 3
            &[0, info(10, 0, 0), 3],
            // 5: union
            &[0, info(5, 2, 1), 8, 0, 4, 0, name("field"), 1, 3 << 24 | 5],
            // 6: the structure
            &[
                name("page"),
                info(4, 2, 0),
                16,
                name("flags"),
                2,
                0,
                0,
                5,
                64,
            ],
            // 7: enum
            &[0, info(6, 1, 0), 4, name("LONGTERM"), 256],
        ]
        .concat();
        let types: Vec<u8> = types.into_iter().flat_map(u32::to_ne_bytes).collect();
        let mut bytes = MAGIC.to_ne_bytes().to_vec();
        bytes.extend([1, 0]);
        for number in [
            24,
            0,
            types.len() as u32,
            types.len() as u32,
            strings.len() as u32,
        ] {
            bytes.extend(number.to_ne_bytes());
        }
        bytes.extend(types);
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn members_of_unnamed_parts_are_found() {
        let btf = Btf::parse(&made()).unwrap();
        assert_eq!(btf.size("page"), Some(16));
        assert_eq!(btf.offset("page", "flags"), Some(0));
        assert_eq!(btf.offset("page", "lru"), Some(8));
        assert_eq!(btf.offset("page", "count"), Some(12));
        assert_eq!(btf.offset("page", "field"), Some(8));
        assert_eq!(btf.offset("page", "no"), None);
        assert_eq!(btf.offset("folio", "lru"), None);
        assert_eq!(btf.constant("LONGTERM"), Some(256));
        assert_eq!(btf.constant("LONG"), None);
    }

    #[test]
    fn truncated_btf_does_not_panic_or_loop() {
        let whole = made();
        for len in 0..whole.len() {
            if let Some(btf) = Btf::parse(&whole[..len]) {
                btf.offset("page", "count");
            }
        }
        let mut other = whole.clone();
        other[0] ^= 1;
        assert!(Btf::parse(&other).is_none());
    }

    #[test]
    fn btf_of_this_kernel_is_read() {
        let Ok(btf) = Btf::read() else {
            return eprintln!("SKIP: no {FILE}");
        };
        assert_eq!(btf.offset("list_head", "prev"), Some(8));
        assert!(btf.offset("folio", "_pincount").is_some());
    }
}
