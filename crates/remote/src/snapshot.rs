//! Snapshots in folders of buckets.

use crate::bucket::StoreBucket;
use crate::place::UrlPlace;
use crate::{FolderKind, OpenOptions, Remote, RemoteFolder, SaveOptions, upload};
use dmafile::internal::{Verb, without_secrets};
use dmafile::{CancelToken, Error, Result, Verify};
use dmafile_record::{Snapshot, SnapshotStore, SourceUpload, StoredSnapshot};
use rustix::io::Errno;
use std::sync::Arc;

impl Remote {
    /// Saves a snapshot to a folder of a bucket; `cancel` ends that.
    ///
    /// # Errors
    /// Kind `Usage` for a URL that is no folder of a bucket; otherwise as [`Snapshot::run_in`].
    pub fn save_snapshot(
        &self,
        snapshot: Snapshot,
        url: &str,
        cancel: &CancelToken,
    ) -> Result<StoredSnapshot> {
        let place = UrlPlace::parse(url)?;
        let UrlPlace::Bucket {
            dialect, bucket, ..
        } = &place
        else {
            let why = "only stores have snapshots: s3://, gs:// or az://";
            return Err(Error::usage("URL", why));
        };
        if !place.is_folder() {
            let why = format!("'{}' names an object", without_secrets(url));
            return Err(Error::usage("URL", why).with_remedy("end it with a slash"));
        }
        let client = self.client(*dialect);
        let bucket = StoreBucket::open_to_save(client, *dialect, bucket, cancel.clone())?;
        let prefix = place.path().to_string();
        let folder = RemoteFolder {
            options: OpenOptions {
                cancel: cancel.clone(),
                ..self.options.clone()
            },
            client: Arc::clone(client),
            kind: FolderKind::Bucket(bucket),
            prefix,
            listed: Default::default(),
        };
        let saved = snapshot.cancel(cancel.clone()).run_in(&folder);
        // As after a load, no connection is left.
        client.close();
        saved
    }
}

impl RemoteFolder {
    /// The bucket, and the key of an object in this folder.
    fn key(&self, name: &str) -> Result<(&StoreBucket, String)> {
        match &self.kind {
            FolderKind::Bucket(bucket) => Ok((bucket, format!("{}{name}", self.prefix))),
            FolderKind::Web(..) | FolderKind::Hub(_) => {
                let error = Error::new(Verb::Save, "only stores have snapshots");
                Err(error.with_errno(Errno::OPNOTSUPP))
            }
        }
    }
}

impl SnapshotStore for RemoteFolder {
    fn list(&self) -> Result<Vec<String>> {
        let (bucket, prefix) = self.key("")?;
        let listed = bucket.list(&prefix)?.into_iter();
        Ok(listed.map(|object| object.0).collect())
    }

    fn read(&self, name: &str) -> Result<Option<(Vec<u8>, String)>> {
        let (bucket, key) = self.key(name)?;
        bucket.read(&bucket.path(&key)?)
    }

    fn put(&self, name: &str, bytes: Vec<u8>, instead_of: Option<&str>) -> Result<()> {
        let (bucket, key) = self.key(name)?;
        bucket.replace(&bucket.path(&key)?, bytes, instead_of)
    }

    fn upload(&self, name: &str, source: SourceUpload) -> Result<(u64, String)> {
        let (bucket, key) = self.key(name)?;
        let options = SaveOptions {
            verify: Some(Verify::compute(source.algorithm)),
            connections: source.depth,
            progress: source.progress,
            cancel: self.options.cancel.clone(),
            ..SaveOptions::default()
        };
        let saved = upload::send(bucket.clone(), key, source.reader, &options)?;
        let digest = saved
            .digest
            .as_deref()
            .and_then(|text| text.split_once(' '));
        let (_, hex) = digest.expect("it was asked for");
        Ok((saved.bytes, hex.to_string()))
    }

    fn clear(&self, is_own: fn(&str) -> bool) {
        if let Ok((bucket, prefix)) = self.key("") {
            bucket.clear_leftovers(&prefix, |key| key.strip_prefix(&prefix).is_some_and(is_own));
        }
    }

    fn remove(&self, name: &str) -> Result<()> {
        let (bucket, key) = self.key(name)?;
        bucket.remove(&bucket.path(&key)?)
    }
}
