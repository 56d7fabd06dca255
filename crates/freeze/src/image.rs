//! CRIU's image files: a head of eight bytes, then messages, each after its length. Messages are
//! [protocol buffers](https://protobuf.dev/programming-guides/encoding/), of which only a few fields are read or
//! changed here; all others are kept as they are, known or not.

/// The length of the two magic numbers.
const HEAD: usize = 8;

/// An image file with messages.
#[derive(Debug)]
pub(crate) struct Image {
    head: [u8; HEAD],
    pub messages: Vec<Message>,
}

/// A message: its fields in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Message(Vec<(u64, Field)>);

#[derive(Clone, Debug, PartialEq)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
    /// Four or eight bytes.
    Fixed(Vec<u8>),
}

impl Image {
    /// None for what is no such file.
    pub fn parse(mut bytes: &[u8]) -> Option<Self> {
        let head = bytes.split_off(..HEAD)?.try_into().ok()?;
        let mut messages = Vec::new();
        while !bytes.is_empty() {
            let length = u32::from_le_bytes(bytes.split_off(..4)?.try_into().ok()?);
            let message = bytes.split_off(..usize::try_from(length).ok()?)?;
            messages.push(Message::parse(message)?);
        }
        Some(Self { head, messages })
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut all = self.head.to_vec();
        for message in &self.messages {
            let bytes = message.to_bytes();
            all.extend(u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
            all.extend(bytes);
        }
        all
    }
}

impl Message {
    pub fn parse(mut bytes: &[u8]) -> Option<Self> {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let key = number(&mut bytes)?;
            let field = match key & 7 {
                0 => Field::Number(number(&mut bytes)?),
                1 => Field::Fixed(bytes.split_off(..8)?.to_vec()),
                2 => {
                    let length = usize::try_from(number(&mut bytes)?).ok()?;
                    Field::Bytes(bytes.split_off(..length)?.to_vec())
                }
                5 => Field::Fixed(bytes.split_off(..4)?.to_vec()),
                _ => return None,
            };
            fields.push((key >> 3, field));
        }
        Some(Self(fields))
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for (name, field) in &self.0 {
            match field {
                Field::Number(value) => {
                    put(&mut all, name << 3);
                    put(&mut all, *value);
                }
                Field::Bytes(bytes) => {
                    put(&mut all, name << 3 | 2);
                    put(&mut all, bytes.len() as u64);
                    all.extend(bytes);
                }
                Field::Fixed(bytes) => {
                    put(&mut all, name << 3 | if bytes.len() == 8 { 1 } else { 5 });
                    all.extend(bytes);
                }
            }
        }
        all
    }

    fn get(&self, name: u64) -> Option<&Field> {
        // The last one counts.
        let found = self.0.iter().rev().find(|(other, _)| *other == name);
        found.map(|(_, field)| field)
    }

    pub fn number(&self, name: u64) -> Option<u64> {
        match self.get(name)? {
            Field::Number(value) => Some(*value),
            _ => None,
        }
    }

    pub fn bytes(&self, name: u64) -> Option<&[u8]> {
        match self.get(name)? {
            Field::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    pub fn message(&self, name: u64) -> Option<Self> {
        Self::parse(self.bytes(name)?)
    }

    /// Calls `with` for each of the messages with this name; None if one is not valid.
    pub fn each_message(&mut self, name: u64, mut with: impl FnMut(&mut Self)) -> Option<()> {
        for (other, field) in &mut self.0 {
            if let Field::Bytes(bytes) = field
                && *other == name
            {
                let mut message = Self::parse(bytes)?;
                with(&mut message);
                *bytes = message.to_bytes();
            }
        }
        Some(())
    }

    fn set(&mut self, name: u64, field: Field) {
        match self.0.iter_mut().rev().find(|(other, _)| *other == name) {
            Some((_, old)) => *old = field,
            None => self.0.push((name, field)),
        }
    }

    pub fn set_number(&mut self, name: u64, value: u64) {
        self.set(name, Field::Number(value));
    }

    pub fn set_bytes(&mut self, name: u64, value: &[u8]) {
        self.set(name, Field::Bytes(value.to_vec()));
    }
}

/// A number in groups of seven bits, the lowest first.
fn number(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.split_off_first()?;
        let part = u64::from(byte & 0x7f);
        if part << shift >> shift != part {
            return None;
        }
        value |= part << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn put(all: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        all.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    all.push(value.to_le_bytes()[0]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_changed_is_kept() {
        // Field 1: text, 2: a large number, 3: eight bytes, 4: four bytes, 900: a number.
        let message = b"\x0a\x03own\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x19abcdefgh\x25ijkl\xa0\x38\x07";
        let mut bytes = b"\x19\x43\x56\x54\x99\x34\x45\x48".to_vec();
        bytes.push(u8::try_from(message.len()).unwrap());
        bytes.extend(b"\0\0\0");
        bytes.extend(message);
        let mut image = Image::parse(&bytes).unwrap();
        assert_eq!(image.to_bytes(), bytes);
        let message = &mut image.messages[0];
        assert_eq!(message.bytes(1), Some(&b"own"[..]));
        assert_eq!(
            (message.number(2), message.number(900)),
            (Some(u64::MAX), Some(7))
        );
        assert_eq!((message.number(1), message.bytes(2)), (None, None));
        message.set_number(900, 300);
        message.set_bytes(5, b"new");
        let again = Image::parse(&image.to_bytes()).unwrap();
        assert_eq!(again.messages[0].number(900), Some(300));
        assert_eq!(again.messages[0].bytes(5), Some(&b"new"[..]));
        assert_eq!(again.messages[0].bytes(1), Some(&b"own"[..]));
    }

    #[test]
    fn what_is_no_image_is_refused() {
        for bytes in [
            &b"short"[..],
            b"12345678\x02\0\0\0\x08",
            b"12345678\x02\0\0\0\x0b\x00",
            b"12345678\x03\0\0\0\x0a\x09x",
            b"12345678\x0c\0\0\0\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            b"12345678\x0b\0\0\0\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        ] {
            assert!(Image::parse(bytes).is_none(), "{bytes:?}");
        }
    }
}
