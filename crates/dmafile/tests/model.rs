//! Models: every tensor is where its header says, in models of one or several files, whether all tensors or
//! some are loaded.

use dmafile::{About, Buffer, Io, Kind, Load, Method, Model, Pages, Pattern, Tensor, Verify};
use dmafile_testkit::models::{Written, gguf, safetensors, sharded, tensors};
use dmafile_testkit::{bytes_digest, cached, dir, evict, file_digest};
use std::path::Path;

const MIB: u64 = 1 << 20;

/// The bytes of a tensor in a buffer, through the descriptor if there is one.
fn bytes_of(buffer: &Buffer, at: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    buffer.access().unwrap().read_at(at, &mut bytes).unwrap();
    bytes
}

fn check(buffer: &Buffer, model: &Model, written: &[Written], what: &str) {
    for (name, _, shape, bytes) in written {
        let tensor = model
            .tensor(name)
            .unwrap_or_else(|| panic!("{what}: no {name}"));
        assert_eq!(&tensor.shape, shape, "{what} {name}");
        assert_eq!(tensor.bytes, bytes.len() as u64, "{what} {name}");
        assert!(
            bytes_of(buffer, tensor.at, tensor.bytes) == *bytes,
            "{what}: wrong bytes in {name}"
        );
    }
}

fn patterns(texts: &[&str]) -> Vec<Pattern> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn names<'m>(tensors: impl IntoIterator<Item = &'m Tensor>) -> Vec<&'m str> {
    tensors
        .into_iter()
        .map(|tensor| tensor.name.as_str())
        .collect()
}

/// Three shards in a folder.
fn three(folder: &Path) -> Vec<Vec<Written>> {
    let shards: Vec<_> = (0..3)
        .map(|no| tensors(&format!("layer{no}"), 5, 900_000))
        .collect();
    sharded(folder, &shards);
    shards
}

#[test]
fn tensors_of_one_file_are_at_their_offsets() {
    let dir = dir();
    let written = tensors("a", 7, 300_000);
    let st = dir.path().join("model.safetensors");
    safetensors(&st, &written);
    let gg = dir.path().join("model.gguf");
    gguf(&gg, &written, None);
    for path in [&st, &gg] {
        let model = Model::open(path).unwrap();
        assert_eq!(model.tensors().len(), 7);
        for kind in [Kind::Anon, Kind::Memfd] {
            let loaded = model.load().to(kind.clone()).run().unwrap();
            check(&loaded.buffer, &model, &written, &format!("{kind}"));
            // The buffer has all bytes of the file.
            let size = path.metadata().unwrap().len();
            assert_eq!(loaded.report.bytes, size);
            assert_eq!(
                dmafile_testkit::buffer_digest(&loaded.buffer),
                file_digest(path, 0, size)
            );
        }
    }
}

#[test]
fn every_method_loads_shards_into_one_buffer() {
    let dir = dir();
    let shards = three(dir.path());
    let written: Vec<_> = shards.concat();
    let files: Vec<_> = (1..=3)
        .map(|no| {
            dir.path()
                .join(format!("model-{no:05}-of-00003.safetensors"))
        })
        .collect();
    let index = dir.path().join("model.safetensors.index.json");
    let model = Model::open(dir.path()).unwrap();
    assert_eq!(Model::open(&index).unwrap().tensors(), model.tensors());
    assert_eq!(model.shards().len(), 3);
    for method in dmafile_testkit::methods() {
        for io in [Io::Auto, Io::Direct, Io::Buffered] {
            for pages in [Pages::Auto, Pages::Base] {
                files.iter().for_each(|file| evict(file));
                let load = model.load().method(method).io(io).pages(pages);
                let what = format!("{method} {io} {pages}");
                let loaded = match load.block(256 << 10).run() {
                    Ok(loaded) => loaded,
                    // Bounce buffers are always direct.
                    Err(error) if (method, io) == (Method::Bounce, Io::Buffered) => {
                        assert_eq!(error.raw_os_error(), Some(95), "{error}");
                        continue;
                    }
                    Err(error) => panic!("{what}: {error}"),
                };
                if io == Io::Direct {
                    assert_eq!(files.iter().map(|file| cached(file)).sum::<u64>(), 0);
                }
                check(&loaded.buffer, &model, &written, &what);
                // All bytes of each file, and zeros in between.
                let mut done = 0;
                for (shard, file) in loaded.report.shards.iter().zip(&files) {
                    let gap = bytes_of(&loaded.buffer, done, shard.at - done);
                    assert!(gap.iter().all(|&byte| byte == 0), "{what}");
                    let bytes = bytes_of(&loaded.buffer, shard.at, shard.bytes);
                    assert_eq!(bytes_digest(&bytes), file_digest(file, 0, shard.bytes));
                    done = shard.at + shard.bytes;
                }
                assert_eq!(done, loaded.buffer.len(), "{what}");
                let total: u64 = loaded.report.shards.iter().map(|shard| shard.bytes).sum();
                assert_eq!(loaded.report.bytes, total, "{what}");
            }
        }
    }
}

#[test]
fn a_split_gguf_loads_into_one_buffer_and_must_be_complete() {
    let dir = dir();
    let name = |no: u32| dir.path().join(format!("m-{no:05}-of-00002.gguf"));
    let shards = [tensors("a", 3, 100_000), tensors("b", 3, 50_000)];
    for (no, shard) in shards.iter().enumerate() {
        gguf(&name(no as u32 + 1), shard, Some((no as u16, 2)));
    }
    for path in [dir.path(), &name(1)] {
        let model = Model::open(path).unwrap();
        let loaded = model.load().run().unwrap();
        check(&loaded.buffer, &model, &shards.concat(), "split");
    }
    let model = Model::open(name(1)).unwrap();
    let loaded = model
        .load_tensors(&patterns(&["a.2.w", "b.0.w"]))
        .unwrap()
        .run()
        .unwrap();
    let chosen = [shards[0][2].clone(), shards[1][0].clone()];
    check(&loaded.buffer, &model, &chosen, "some of a split");
    // The second file can be opened by itself.
    assert_eq!(Model::open(name(2)).unwrap().tensors().len(), 3);
    gguf(&name(2), &shards[1], Some((0, 2)));
    let error = Model::open(name(1)).err().unwrap().to_string();
    assert!(
        error.contains("file 2 of 2") && error.contains("EBADMSG"),
        "{error}"
    );
    std::fs::remove_file(name(2)).unwrap();
    let error = Model::open(name(1)).err().unwrap().to_string();
    assert!(
        error.contains("m-00002-of-00002.gguf") && error.contains("ENOENT"),
        "{error}"
    );
}

#[test]
fn only_chosen_tensors_are_read() {
    let dir = dir();
    let shards = three(dir.path());
    let written = shards.concat();
    let model = Model::open(dir.path()).unwrap();
    for (texts, want) in [
        (vec!["layer1.0.w"], vec!["layer1.0.w"]),
        (
            vec!["layer2.4.w", "layer0.0.w"],
            vec!["layer0.0.w", "layer2.4.w"],
        ),
        (
            vec!["*.3.w"],
            vec!["layer0.3.w", "layer1.3.w", "layer2.3.w"],
        ),
        (
            vec!["re:layer[02]\\.1\\.w"],
            vec!["layer0.1.w", "layer2.1.w"],
        ),
    ] {
        let patterns = patterns(&texts);
        assert_eq!(names(model.matching(&patterns).unwrap()), want);
        for kind in ["anon", "memfd", "fd"] {
            for io in [Io::Direct, Io::Buffered] {
                for shard in model.shards() {
                    evict(&shard.file);
                }
                let to = match kind {
                    "fd" => Kind::fd(dmafile_testkit::dirty_memfd(model.shards()[2].at + 8 * MIB)),
                    word => word.parse().unwrap(),
                };
                let load = model.load_tensors(&patterns).unwrap();
                let loaded = load.to(to).io(io).run().unwrap();
                let what = format!("{texts:?} to {kind} {io}");
                let chosen: Vec<_> = written
                    .iter()
                    .filter(|tensor| want.contains(&tensor.0.as_str()))
                    .cloned()
                    .collect();
                check(&loaded.buffer, &model, &chosen, &what);
                let bytes: u64 = chosen.iter().map(|tensor| tensor.3.len() as u64).sum();
                assert_eq!(loaded.report.bytes, bytes, "{what}");
                let moved = loaded.report.bytes_direct + loaded.report.bytes_buffered;
                assert_eq!(moved, bytes, "{what}: what is counted");
                if kind == "memfd" {
                    let fd = loaded.buffer.as_fd().unwrap();
                    let taken = rustix::fs::fstat(fd).unwrap().st_blocks as u64 * 512;
                    // At most, each tensor has a huge page at either end.
                    assert!(
                        taken <= bytes + want.len() as u64 * 4 * MIB,
                        "{what}: {taken}"
                    );
                }
            }
        }
    }
    let error = model.load_tensors(&patterns(&["layer9*"])).err().unwrap();
    assert!(
        error
            .to_string()
            .contains("nothing matches 'layer9*' (ENOENT)"),
        "{error}"
    );
    let verify: Verify = "sha256".parse().unwrap();
    let load = model.load_tensors(&patterns(&["*.3.w"])).unwrap();
    let error = load.verify(verify).run().unwrap_err();
    assert_eq!(error.kind(), dmafile::ErrorKind::Usage);
}

#[test]
fn one_tensor_or_a_part_of_it_can_be_loaded_alone() {
    let dir = dir();
    let written = three(dir.path()).concat();
    let model = Model::open(dir.path()).unwrap();
    for (name, _, _, bytes) in &written {
        let tensor = model.tensor(name).unwrap();
        let loaded = model
            .load_tensor(tensor)
            .unwrap()
            .to(Kind::Anon)
            .run()
            .unwrap();
        assert!(loaded.buffer.as_slice().unwrap() == bytes, "{name}");
        let part = model.load_part(tensor, 777, 1000).unwrap().to(Kind::Anon);
        let part = part.run().unwrap().buffer;
        assert_eq!(part.as_slice().unwrap(), &bytes[777..1777]);
        let mut part = [0; 1000];
        model.read_part(tensor, 777, &mut part).unwrap();
        assert_eq!(part, bytes[777..1777]);
        model.read_part(tensor, tensor.bytes, &mut []).unwrap();
    }
    let tensor = model.tensor("layer0.0.w").unwrap();
    for (offset, len) in [(tensor.bytes, 1), (1, tensor.bytes), (u64::MAX, 2)] {
        let error = model.load_part(tensor, offset, len).err().unwrap();
        assert_eq!(error.raw_os_error(), Some(22), "{error}");
    }
    let error = model.read_part(tensor, tensor.bytes, &mut [0]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(22), "{error}");
    assert!(model.load_part(tensor, 5, 0).is_err());
}

#[test]
fn every_file_has_its_own_digest() {
    let dir = dir();
    three(dir.path());
    let model = Model::open(dir.path()).unwrap();
    for algorithm in ["sha256", "blake3", "xxh3", "crc32c"] {
        let load = model.load().verify(algorithm.parse().unwrap());
        let verified = load.run().unwrap().report.verify;
        assert_eq!(verified.len(), 3);
        for (one, shard) in verified.iter().zip(model.shards()) {
            assert_eq!(one.file, shard.file);
            let alone = Load::new(&shard.file).verify(algorithm.parse().unwrap());
            assert_eq!(one.digest, alone.run().unwrap().report.verify[0].digest);
            if algorithm == "sha256" {
                assert_eq!(one.digest, file_digest(&shard.file, 0, shard.bytes));
            }
        }
    }
    let expected: Verify = format!("sha256={}", "0".repeat(64)).parse().unwrap();
    let error = model.load().verify(expected).run().unwrap_err();
    assert_eq!(error.kind(), dmafile::ErrorKind::Usage, "{error}");
}

/// With the layout of the cache of `huggingface_hub`.
#[test]
fn the_digest_in_the_name_of_a_hugging_face_blob_is_checked() {
    let dir = dir();
    let repository = dir.path().join("models--a--b");
    let (blobs, snapshot) = (repository.join("blobs"), repository.join("snapshots/0f"));
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::create_dir_all(&snapshot).unwrap();
    let plain = dir.path().join("plain");
    safetensors(&plain, &tensors("a", 3, 100_000));
    let size = plain.metadata().unwrap().len();
    let digest = file_digest(&plain, 0, size);
    let link = |blob: &str, name: &str| {
        std::fs::copy(&plain, blobs.join(blob)).unwrap();
        let path = snapshot.join(name);
        std::os::unix::fs::symlink(format!("../../blobs/{blob}"), &path).unwrap();
        path
    };
    let sha256 = || "sha256".parse::<Verify>().unwrap();
    let good = link(&digest, "good.safetensors");
    let report = Load::new(&good).verify(sha256()).run().unwrap().report;
    assert!(report.verify[0].matched && report.verify[0].digest == digest);
    assert!(
        report
            .reasons
            .iter()
            .any(|reason| reason.about == About::Verify)
    );
    // The name is not compared for a part of the file, or with another algorithm.
    let part = Load::new(&good)
        .length(5000)
        .verify(sha256())
        .run()
        .unwrap();
    assert!(!part.report.verify[0].matched);
    let other = Load::new(&good)
        .verify("crc32c".parse().unwrap())
        .run()
        .unwrap();
    assert!(!other.report.verify[0].matched);
    let bad = link(&"a".repeat(64), "bad.safetensors");
    let error = Load::new(&bad).verify(sha256()).run().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(74), "{error}");
    // The names of small files are not SHA-256 digests, so they are not compared.
    let small = link(&"b".repeat(40), "small.safetensors");
    assert!(
        !Load::new(&small)
            .verify(sha256())
            .run()
            .unwrap()
            .report
            .verify[0]
            .matched
    );
}

#[test]
fn an_invalid_index_and_mismatched_files_are_refused() {
    let refused = |path: &Path, want: &str| {
        let error = Model::open(path).err().unwrap().to_string();
        assert!(error.contains(want), "{error} should say {want}");
        assert_eq!(error.lines().count(), 1, "{error}");
    };
    let folder = dir();
    let index = folder.path().join("model.safetensors.index.json");
    three(folder.path());
    let good = std::fs::read_to_string(&index).unwrap();
    for (from, to, want) in [
        ("layer1.0.w", "layer7.0.w", "has no tensor"),
        (
            "model-00002-of",
            "../model-00002-of",
            "not a plain file name",
        ),
        (
            "model-00002-of-00003.safetensors",
            "/etc/passwd",
            "not a plain file name",
        ),
        ("model-00002-of", "model-00009-of", "(ENOENT)"),
        ("weight_map", "wait_map", "not a valid index"),
        ("{", "[", "not a valid index"),
    ] {
        std::fs::write(&index, good.replace(from, to)).unwrap();
        refused(&index, want);
    }
    std::fs::write(&index, r#"{"weight_map":{}}"#).unwrap();
    refused(&index, "names no file");

    // Two files with a tensor of the same name.
    let folder = dir();
    safetensors(&folder.path().join("a.safetensors"), &tensors("a", 2, 1000));
    safetensors(&folder.path().join("b.safetensors"), &tensors("a", 1, 1000));
    refused(folder.path(), "an earlier file also has");
    let folder = dir();
    refused(folder.path(), "without a model in it (EISDIR)");
    gguf(&folder.path().join("a.gguf"), &tensors("a", 1, 1000), None);
    gguf(&folder.path().join("b.gguf"), &tensors("a", 1, 1000), None);
    refused(folder.path(), "several GGUF models");
}

/// macOS puts `._NAME` next to each NAME on disks of other systems. Other hidden files are no model either.
#[test]
fn hidden_files_belong_to_no_model() {
    let hide = |folder: &Path| {
        for entry in std::fs::read_dir(folder).unwrap().collect::<Vec<_>>() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            std::fs::write(folder.join(format!("._{name}")), b"\0\x05\x16\x07").unwrap();
        }
        let cached = folder.join(".cached.safetensors");
        safetensors(&cached, &tensors("cached", 1, 1000));
        std::fs::write(folder.join(".safetensors.index.json"), "{}").unwrap();
        std::fs::write(folder.join(".gguf"), "").unwrap();
    };
    let opened = |folder: &Path| {
        let model = Model::open(folder).unwrap();
        (model.shards().len(), model.tensors().len())
    };
    let one = dir();
    safetensors(&one.path().join("a.safetensors"), &tensors("a", 2, 1000));
    let indexed = dir();
    three(indexed.path());
    let several = dir();
    three(several.path());
    std::fs::remove_file(several.path().join("model.safetensors.index.json")).unwrap();
    let single = dir();
    gguf(&single.path().join("a.gguf"), &tensors("a", 2, 1000), None);
    let split = dir();
    for no in 0..2 {
        let name = format!("m-0000{}-of-00002.gguf", no + 1);
        let written = tensors(&format!("{no}"), 3, 1000);
        gguf(&split.path().join(name), &written, Some((no, 2)));
    }
    for (folder, files, tensors) in [
        (one, 1, 2),
        (indexed, 3, 15),
        (several, 3, 15),
        (single, 1, 2),
        (split, 2, 6),
    ] {
        hide(folder.path());
        assert_eq!(opened(folder.path()), (files, tensors));
    }
    let folder = dir();
    hide(folder.path());
    let error = Model::open(folder.path()).err().unwrap().to_string();
    assert!(error.contains("without a model in it"), "{error}");
    // It can still be named.
    let named = Model::open(folder.path().join(".cached.safetensors")).unwrap();
    assert_eq!(named.tensors().len(), 1);
}

/// Where some tensors of a model have been replaced, in a further file, the index says which copy counts.
#[test]
fn the_index_decides_between_copies_of_a_tensor() {
    let (old, new) = (tensors("t", 4, 20_000), tensors("t", 4, 70_000));
    let mut first = old.clone();
    first.extend(tensors("only", 1, 5000));
    let replaced = &new[1..3];
    for last in [false, true] {
        let folder = dir();
        let names = ["a.safetensors", "b.safetensors"];
        // The newer copies come before or after the older ones.
        let (base, patch) = if last {
            (names[0], names[1])
        } else {
            (names[1], names[0])
        };
        safetensors(&folder.path().join(base), &first);
        safetensors(&folder.path().join(patch), replaced);
        let places = [
            ("t.0.w", base),
            ("t.1.w", patch),
            ("t.2.w", patch),
            ("t.3.w", base),
        ];
        let map: Vec<_> = places
            .map(|(name, file)| format!(r#""{name}":"{file}""#))
            .into();
        let index = folder.path().join("model.safetensors.index.json");
        let write = |map: &str| std::fs::write(&index, format!(r#"{{"weight_map":{{{map}}}}}"#));
        write(&map.join(",")).unwrap();
        let model = Model::open(folder.path()).unwrap();
        let loaded = model.load().run().unwrap();
        let right = [&first[0], &replaced[0], &replaced[1], &first[3], &first[4]].map(Clone::clone);
        check(&loaded.buffer, &model, &right, "by the index");
        // What the index does not name is there as well, once.
        assert_eq!(model.tensors().len(), 5);
        let chosen = model
            .load_tensors(&patterns(&["t.*"]))
            .unwrap()
            .run()
            .unwrap();
        check(&chosen.buffer, &model, &right[..4], "chosen by the index");
        let bytes: u64 = right[..4].iter().map(|one| one.3.len() as u64).sum();
        assert_eq!(chosen.report.bytes, bytes);
        // Without a word of the index neither copy is the right one.
        write(&map[2..].join(",")).unwrap();
        let error = Model::open(folder.path()).err().unwrap().to_string();
        assert!(
            error.contains(r#"an earlier file also has a tensor "t.1.w""#)
                && error.contains("EBADMSG"),
            "{error}"
        );
        // The named file must have it, whatever others have.
        write(&format!(r#"{},"only.0.w":"{patch}""#, map.join(","))).unwrap();
        let error = Model::open(folder.path()).err().unwrap().to_string();
        assert!(error.contains("has no tensor \"only.0.w\""), "{error}");
    }
}

#[test]
fn a_truncated_shard_is_named() {
    for (number, len) in [(0, 0), (0, 5000), (1, 5000), (2, 7)] {
        let dir = dir();
        let written = three(dir.path());
        let model = Model::open(dir.path()).unwrap();
        let shard = &model.shards()[number].file;
        let file = std::fs::File::options().write(true).open(shard).unwrap();
        file.set_len(len).unwrap();
        for method in [Method::Auto, Method::Threads, Method::Bounce] {
            let error = model.load().method(method).run().unwrap_err().to_string();
            let name = shard.file_name().unwrap().to_str().unwrap();
            assert!(
                error.contains(name) && error.contains("ENODATA"),
                "{method}: {error}"
            );
        }
        // Loads of tensors in other files still work.
        let other = format!("layer{}.4.w", (number + 1) % 3);
        let load = model.load_tensors(&patterns(&[&other])).unwrap();
        let loaded = load.run().unwrap();
        let chosen = written.concat();
        let chosen: Vec<_> = chosen.into_iter().filter(|one| one.0 == other).collect();
        check(&loaded.buffer, &model, &chosen, &other);
    }
}

#[test]
fn growth_of_a_shard_after_open_is_not_loaded() {
    let dir = dir();
    let written = three(dir.path()).concat();
    let model = Model::open(dir.path()).unwrap();
    for shard in model.shards() {
        let mut file = std::fs::File::options()
            .append(true)
            .open(&shard.file)
            .unwrap();
        std::io::Write::write_all(&mut file, &[7; 9000]).unwrap();
        evict(&shard.file);
    }
    for method in dmafile_testkit::methods() {
        let loaded = model.load().method(method).run().unwrap();
        check(&loaded.buffer, &model, &written, "grown");
        let mut done = 0;
        for shard in &loaded.report.shards {
            let gap = bytes_of(&loaded.buffer, done, shard.at - done);
            assert!(gap.iter().all(|&byte| byte == 0), "{method}: no gap");
            done = shard.at + shard.bytes;
        }
    }
}

#[test]
fn ranges_may_span_shards_in_any_memory() {
    let dir = dir();
    three(dir.path());
    let model = Model::open(dir.path()).unwrap();
    let whole = model.load().to(Kind::Anon).run().unwrap();
    assert_eq!(whole.report.shards.len(), 3);
    let whole = whole.buffer.as_slice().unwrap().to_vec();
    let border = model.shards()[1].at;
    let end = model.shards()[0].bytes;
    for (start, stop) in [
        (0, whole.len() as u64),
        (end - 5, border + 5),
        (end - 1, end + 1),
        (end, end + 10),
        (border - 1, border + 4097),
        (border, border + 1),
        (777, whole.len() as u64 - 777),
    ] {
        let want = &whole[start as usize..stop as usize];
        for io in [Io::Auto, Io::Direct, Io::Buffered] {
            model.shards().iter().for_each(|shard| evict(&shard.file));
            let load = || model.load().offset(start).length(stop - start).io(io);
            let what = format!("{start} to {stop} {io}");
            let loaded = load().to(Kind::Anon).run().unwrap();
            assert!(loaded.buffer.as_slice().unwrap() == want, "{what}");
            let mut memory = vec![0xff; want.len() + 3 * 4096];
            // From an address with the misalignment of the range.
            let skew = memory.as_ptr().align_offset(4096) + (start % 4096) as usize;
            load().run_into(&mut memory[skew..]).unwrap();
            assert!(memory[skew..].starts_with(want), "{what}, lent");
            assert!(memory[skew + want.len()..].iter().all(|&byte| byte == 0));
        }
        // One digest for each file of which a part is loaded.
        let load = model.load().offset(start).length(stop - start);
        let digests = load
            .verify("sha256".parse().unwrap())
            .run()
            .unwrap()
            .report
            .verify;
        let mut parts = Vec::new();
        for shard in model.shards() {
            let (from, to) = (start.max(shard.at), stop.min(shard.at + shard.bytes));
            if from < to {
                parts.push(bytes_digest(&whole[from as usize..to as usize]));
            }
        }
        let digests: Vec<_> = digests.into_iter().map(|one| one.digest).collect();
        assert_eq!(digests, parts, "{start} to {stop}");
    }
    let tensor = model.tensor("layer1.2.w").unwrap();
    let bytes = &whole[tensor.at as usize..(tensor.at + tensor.bytes) as usize];
    let digest = format!("sha256={}", bytes_digest(bytes));
    let alone = model
        .load_tensor(tensor)
        .unwrap()
        .verify(digest.parse().unwrap());
    let report = alone.run().unwrap().report;
    assert!(report.verify[0].matched && report.shards.is_empty());
}

#[test]
fn a_range_of_chosen_tensors_is_refused() {
    let dir = dir();
    three(dir.path());
    let model = Model::open(dir.path()).unwrap();
    let tensor = model.tensor("layer1.2.w").unwrap();
    let chosen = || model.load_tensors(&patterns(&["layer1.*"])).unwrap();
    let alone = || model.load_tensor(tensor).unwrap();
    for load in [
        chosen().offset(1 << 20),
        chosen().length(1 << 20),
        alone().offset(1),
        alone().length(1),
    ] {
        let error = load.run().unwrap_err();
        assert_eq!(error.kind(), dmafile::ErrorKind::Usage, "{error}");
    }
}

#[test]
fn small_gaps_between_tensors_are_read_but_not_counted() {
    let dir = dir();
    let written = tensors("a", 5, 20_000);
    let path = dir.path().join("small.safetensors");
    safetensors(&path, &written);
    let model = Model::open(&path).unwrap();
    let loaded = model
        .load_tensors(&patterns(&["a.0.w", "a.4.w"]))
        .unwrap()
        .run()
        .unwrap();
    let report = &loaded.report;
    assert_eq!(
        report.bytes,
        (written[0].3.len() + written[4].3.len()) as u64
    );
    assert!(report.bytes_direct + report.bytes_buffered > report.bytes);
    check(
        &loaded.buffer,
        &model,
        &[written[0].clone(), written[4].clone()],
        "gap",
    );
}

/// Data at both ends of 2 TiB: bytes that are not requested need neither memory nor time.
#[test]
fn small_tensors_of_a_file_of_2_tib_are_loaded() {
    let dir = dir();
    let path = dir.path().join("giant.safetensors");
    let middle = 2_u64 << 40;
    let header = format!(
        r#"{{"first":{{"dtype":"U8","shape":[5000],"data_offsets":[0,5000]}},"middle":{{"dtype":"U8","shape":[{middle}],"data_offsets":[5000,{}]}},"last":{{"dtype":"U8","shape":[5000],"data_offsets":[{},{}]}}}}"#,
        5000 + middle,
        5000 + middle,
        10_000 + middle
    );
    let noise = dmafile_testkit::noise(10_000, 1);
    let file = std::fs::File::create(&path).unwrap();
    use std::os::unix::fs::FileExt;
    file.write_all_at(&(header.len() as u64).to_le_bytes(), 0)
        .unwrap();
    file.write_all_at(header.as_bytes(), 8).unwrap();
    let data = 8 + header.len() as u64;
    file.write_all_at(&noise[..5000], data).unwrap();
    if let Err(error) = file.write_all_at(&noise[5000..], data + 5000 + middle) {
        eprintln!("SKIP: cannot make a file of 2 TiB: {error}");
        return;
    }
    let model = Model::open(&path).unwrap();
    for kind in [Kind::Anon, Kind::Memfd] {
        let load = model.load_tensors(&patterns(&["first", "last"])).unwrap();
        let loaded = load.to(kind).run().unwrap();
        for (name, want) in [("first", &noise[..5000]), ("last", &noise[5000..])] {
            let tensor = model.tensor(name).unwrap();
            assert!(
                bytes_of(&loaded.buffer, tensor.at, tensor.bytes) == want,
                "{name}"
            );
        }
    }
}

#[test]
fn an_incomplete_model_is_refused() {
    let refused = |path: &Path, want: &str| {
        let error = Model::open(path).err().unwrap().to_string();
        assert!(error.contains(want), "{error} should say {want}");
        assert_eq!(error.lines().count(), 1, "{error}");
    };
    // Two of three files, according to their names, without an index.
    let folder = dir();
    let name = |no: u32| {
        folder
            .path()
            .join(format!("model-{no:05}-of-00003.safetensors"))
    };
    safetensors(&name(1), &tensors("a", 2, 1000));
    safetensors(&name(3), &tensors("c", 2, 1000));
    refused(folder.path(), "only 2 of the 3 files");
    safetensors(&name(2), &tensors("b", 2, 1000));
    assert_eq!(Model::open(folder.path()).unwrap().tensors().len(), 6);
    // The first file of a split model under another name.
    let folder = dir();
    let renamed = folder.path().join("model.gguf");
    gguf(&renamed, &tensors("a", 2, 1000), Some((0, 6)));
    refused(&renamed, "one of 6 files according to its header");
    // One of very many files.
    let first = folder.path().join("m-00001-of-99999.gguf");
    gguf(&first, &tensors("a", 2, 1000), Some((0, 6)));
    refused(&first, "m-00002-of-99999.gguf");

    // An index that is a FIFO without a writer.
    let folder = dir();
    let index = folder.path().join("model.safetensors.index.json");
    rustix::fs::mkfifoat(rustix::fs::CWD, &index, rustix::fs::Mode::RWXU).unwrap();
    refused(folder.path(), "not a regular file");
    // Names with terminal control sequences.
    let folder = dir();
    let index = folder.path().join("model.safetensors.index.json");
    let name = "x\\n\\u001b[31mred.safetensors";
    std::fs::write(&index, format!(r#"{{"weight_map":{{"a":"{name}"}}}}"#)).unwrap();
    refused(&index, "not a plain file name");
}

#[test]
fn holes_in_shards_stay_holes() {
    let dir = dir();
    let shards: Vec<_> = (0..2)
        .map(|no| {
            let mut shard = tensors(&format!("s{no}"), 3, 3_000_000);
            shard[1].3.fill(0);
            shard
        })
        .collect();
    let index = sharded(dir.path(), &shards);
    for no in 1..=2 {
        let path = dir
            .path()
            .join(format!("model-{no:05}-of-00002.safetensors"));
        // fallocate -d turns zeros into holes.
        let dug = std::process::Command::new("fallocate")
            .arg("-d")
            .arg(&path)
            .status();
        assert!(dug.expect("fallocate is part of util-linux").success());
        evict(&path);
    }
    let model = Model::open(&index).unwrap();
    let loaded = model
        .load()
        .verify("sha256".parse().unwrap())
        .run()
        .unwrap();
    check(&loaded.buffer, &model, &shards.concat(), "holes");
    assert!(loaded.report.bytes_hole > 5_000_000, "{:?}", loaded.report);
    for (one, shard) in loaded.report.verify.iter().zip(model.shards()) {
        assert_eq!(one.digest, file_digest(&shard.file, 0, shard.bytes));
    }
}

#[test]
fn adjacent_shards_are_loaded_at_any_offset_of_a_memfd() {
    let dir = dir();
    // The first file ends one byte before the offset of the next.
    let sizes = [(2 << 20) - 1, 1 << 20];
    let mut index = Vec::new();
    for (number, size) in sizes.into_iter().enumerate() {
        let name = format!("shard-{number}.safetensors");
        let header = |data: usize| {
            format!(
                "{{\"t{number}\":{{\"dtype\":\"U8\",\"shape\":[{data}],\"data_offsets\":[0,{data}]}}}}"
            )
        };
        // Padded, so that the length of the header does not depend on the number of digits.
        let data = size - 8 - header(size).len();
        let text = format!("{:<width$}", header(data), width = size - 8 - data);
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend(text.bytes());
        file.extend(dmafile_testkit::noise(data, number as u64));
        assert_eq!(file.len(), size);
        std::fs::write(dir.path().join(&name), file).unwrap();
        evict(&dir.path().join(&name));
        index.push(format!("\"t{number}\":\"{name}\""));
    }
    let index = format!("{{\"weight_map\":{{{}}}}}", index.join(","));
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    let model = Model::open(dir.path()).unwrap();
    for at in [0, 1, 2, 511, 4095] {
        for io in [Io::Direct, Io::Buffered] {
            let kind = Kind::fd_at(dmafile_testkit::memfd(8 << 20), at);
            let loaded = model.load().to(kind).io(io).run().unwrap();
            for shard in &loaded.report.shards {
                let bytes = bytes_of(&loaded.buffer, shard.at, shard.bytes);
                let what = format!("{} at byte {at}, {io}", shard.file.display());
                let want = file_digest(&shard.file, 0, shard.bytes);
                assert_eq!(bytes_digest(&bytes), want, "{what}");
            }
        }
    }
}

#[test]
fn digests_of_files_do_not_depend_on_how_parts_are_loaded() {
    let dir = dir();
    three(dir.path());
    let files: Vec<_> = ["1", "2", "3"]
        .map(|number| format!("model-0000{number}-of-00003.safetensors"))
        .map(|name| dir.path().join(name))
        .to_vec();
    let model = Model::open_files(&files).unwrap();
    assert_eq!(model.tensors(), Model::open(dir.path()).unwrap().tensors());
    let last = model.shards().pop().unwrap();
    let (end, part) = (last.at + last.bytes, 700_001);
    let compute = Verify::compute(dmafile::Algorithm::Sha256);
    let mut digests = model.digests(&compute).unwrap();
    for at in (0..end).step_by(part as usize) {
        let load = model.load().offset(at).length(part.min(end - at));
        digests.update(
            load.to(Kind::Anon)
                .run()
                .unwrap()
                .buffer
                .as_slice()
                .unwrap(),
        );
    }
    for (verified, file) in digests.finish().unwrap().iter().zip(&files) {
        assert_eq!(
            (&verified.file, &verified.digest),
            (file, &file_digest(file, 0, u64::from(u32::MAX)))
        );
    }
    let wrong = Verify::expect(dmafile::Algorithm::Sha256, &"0".repeat(64)).unwrap();
    assert!(
        model.digests(&wrong).is_err(),
        "a digest of one file cannot be compared with three files"
    );
    let one = Model::open_files(&files[..1]).unwrap();
    let error = one
        .digests(&wrong)
        .unwrap()
        .finish()
        .unwrap_err()
        .to_string();
    assert!(error.contains("EBADMSG"), "{error}");
    assert!(Model::open_files(&[]).is_err());
}
