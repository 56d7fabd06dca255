//! What this machine lacks for loads from stores, and what a store says of an object.

use crate::{Remote, is_collection};
use dmafile::{Check, Health};
use std::time::Instant;

/// The most memory of one connection (tcp(7)): the third number is for those that grow. About half of it is for bytes that
/// are on their way.
const WINDOW: &str = "/proc/sys/net/ipv4/tcp_rmem";
/// With this much memory, 16 connections receive 2 GiB/s from a store 20 ms away.
const ENOUGH: u64 = 6 << 20;

impl Remote {
    /// Checks what loads from stores need of this machine.
    pub fn doctor(&self) -> Vec<Check> {
        let certificates = match self.other_client().certificates() {
            Ok(count) => {
                let found = format!("{count} certificates of authorities");
                Check::new("stores", Health::Good, found)
            }
            Err(why) => Check::new("stores", Health::Fair, format!("only http: {why}"))
                .remedy("install the package ca-certificates, or set SSL_CERT_FILE"),
        };
        let known = std::fs::read_to_string(WINDOW).unwrap_or_default();
        let most = known.split_whitespace().nth(2);
        let window = most.and_then(|most| most.parse().ok()).map(receive_window);
        [certificates].into_iter().chain(window).collect()
    }

    /// Opens what a URL names, and checks what its store says of it.
    pub fn doctor_of(&self, url: &str) -> Check {
        let begin = Instant::now();
        let objects = match self.open_all(url) {
            Ok(objects) => objects,
            Err(error) => return Check::new("store", Health::Absent, error.to_string()),
        };
        let took = begin.elapsed().as_secs_f64() * 1e3;
        let bytes: u64 = objects.iter().map(|(object, _)| object.size()).sum();
        let Some((first, _)) = objects.first() else {
            return Check::new("store", Health::Absent, "no objects");
        };
        let digest = match first.digest() {
            Ok(Some((algorithm, _))) => format!("it keeps {algorithm} of the whole"),
            _ => "it keeps no digest that is known here".to_string(),
        };
        let count = if is_collection(url) {
            format!("a model of {} files and ", objects.len())
        } else {
            String::new()
        };
        let found = format!(
            "{}: {count}{bytes} bytes in {}, version {}; {digest}; opened in {took:.0} ms",
            dmafile::internal::without_secrets(url),
            first.store(),
            first.version().as_deref().unwrap_or("unknown"),
        );
        let health = match first.version() {
            Some(_) => Health::Good,
            None => Health::Fair,
        };
        Check::new("store", health, found)
    }
}

fn receive_window(most: u64) -> Check {
    let found = format!(
        "a connection receives at most about {:.1} MiB per round trip",
        most as f64 / f64::from(2 << 20)
    );
    if most >= ENOUGH {
        return Check::new("receive window", Health::Good, found);
    }
    Check::new("receive window", Health::Fair, found).remedy(format!(
        "sysctl -w net.ipv4.tcp_rmem='4096 131072 {}'",
        2 * ENOUGH
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_window_is_told_with_its_remedy() {
        assert_eq!(receive_window(ENOUGH).remedy, None);
        let small = receive_window(212_992);
        assert!(small.found.contains(" 0.1 MiB "), "{}", small.found);
        assert!(
            small
                .remedy
                .is_some_and(|remedy| remedy.contains("tcp_rmem"))
        );
    }
}
