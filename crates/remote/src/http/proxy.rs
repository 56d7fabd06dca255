//! Proxies that the environment names, as curl and others use them.

use super::connection::{Connection, WaitCheck};
use super::head::bad;
use std::io;
use std::net::IpAddr;
use url::Url;

#[derive(Debug, Default)]
pub(crate) struct Proxies {
    https: Option<Url>,
    http: Option<Url>,
    /// Hosts that are reached without one.
    without: Vec<String>,
}

impl Proxies {
    pub(crate) fn from_env() -> Self {
        Self::from(|name| std::env::var(name).ok())
    }

    fn from(get: impl Fn(&str) -> Option<String>) -> Self {
        let first = |names: &[&str]| {
            let mut values = names.iter().filter_map(|name| get(name));
            values.find(|value| !value.trim().is_empty())
        };
        let url = |names: &[&str]| {
            let value = first(names)?;
            let has_scheme = value.contains("://");
            let text = if has_scheme {
                value
            } else {
                format!("http://{value}")
            };
            Url::parse(text.trim()).ok()
        };
        let without = first(&["no_proxy", "NO_PROXY"]).unwrap_or_default();
        let without = without
            .split([',', ' '])
            .map(|word| word.trim().to_ascii_lowercase());
        Self {
            https: url(&["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"]),
            // Not HTTP_PROXY: to a CGI program it is a field of the request.
            http: url(&["http_proxy", "all_proxy", "ALL_PROXY"]),
            without: without.filter(|word| !word.is_empty()).collect(),
        }
    }

    /// The proxy for a URL.
    pub(crate) fn of(&self, url: &Url) -> Option<&Url> {
        let proxy = match url.scheme() {
            "https" => self.https.as_ref(),
            _ => self.http.as_ref(),
        };
        proxy.filter(|_| !self.is_without(url))
    }

    fn is_without(&self, url: &Url) -> bool {
        let host = url.host_str().unwrap_or_default().to_ascii_lowercase();
        let host = host.trim_matches(['[', ']']);
        let port = url.port_or_known_default().unwrap_or(0).to_string();
        self.without.iter().any(|word| {
            let (name, own) = match word.rsplit_once(':') {
                Some((name, own)) if own.parse::<u16>().is_ok() && !name.contains(':') => {
                    (name, Some(own))
                }
                _ => (word.as_str(), None),
            };
            if own.is_some_and(|own| own != port) {
                return false;
            }
            let name = name.trim_start_matches("*.").trim_start_matches('.');
            let name = name.trim_matches(['[', ']']);
            name == "*"
                || host == name
                || (!name.is_empty()
                    && host
                        .strip_suffix(name)
                        .is_some_and(|rest| rest.ends_with('.')))
                || in_network(host, name)
        })
    }
}

/// True if an address is in a network (`10.0.0.0/8`).
fn in_network(host: &str, network: &str) -> bool {
    let Some((base, bits)) = network.split_once('/') else {
        return false;
    };
    let (Ok(host), Ok(base), Ok(bits)) = (host.parse(), base.parse(), bits.parse::<u32>()) else {
        return false;
    };
    let same = |one: u128, other: u128, width: u32| {
        bits <= width && (bits == 0 || (one ^ other) >> (width - bits) == 0)
    };
    match (host, base) {
        (IpAddr::V4(host), IpAddr::V4(base)) => {
            same(u32::from(host).into(), u32::from(base).into(), 32)
        }
        (IpAddr::V6(host), IpAddr::V6(base)) => same(host.into(), base.into(), 128),
        _ => false,
    }
}

/// Asks a proxy for a tunnel to a host.
pub(crate) fn tunnel(
    connection: &mut Connection,
    proxy: &Url,
    host: &str,
    port: u16,
    check: WaitCheck<'_>,
) -> io::Result<()> {
    let host = if host.contains(':') {
        format!("[{host}]")
    } else {
        host.to_string()
    };
    let mut text = format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n");
    if let Some(basic) = super::basic(proxy) {
        text.push_str(&format!("Proxy-Authorization: {basic}\r\n"));
    }
    text.push_str("\r\n");
    connection.send(text.as_bytes(), check)?;
    let head = connection.receive_head(check)?;
    match head.status {
        200..300 => Ok(()),
        407 => Err(bad(
            "the proxy demands a password: put it into the variable, user:password@",
        )),
        status => Err(bad(format!(
            "the proxy refuses to connect to {host}:{port} (status {status})"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(values: &'static [(&str, &str)]) -> Proxies {
        Proxies::from(move |name| {
            let found = values.iter().find(|value| value.0 == name);
            found.map(|value| value.1.to_string())
        })
    }

    fn chosen(proxies: &Proxies, url: &str) -> Option<String> {
        proxies.of(&Url::parse(url).unwrap()).map(Url::to_string)
    }

    #[test]
    fn each_scheme_has_its_proxy() {
        let all = proxies(&[("HTTPS_PROXY", "proxy:3128"), ("HTTP_PROXY", "http://evil")]);
        assert_eq!(
            chosen(&all, "https://a/").as_deref(),
            Some("http://proxy:3128/")
        );
        assert_eq!(chosen(&all, "http://a/"), None);
        let all = proxies(&[("all_proxy", "http://p:1"), ("https_proxy", "")]);
        assert_eq!(chosen(&all, "https://a/").as_deref(), Some("http://p:1/"));
        assert_eq!(chosen(&all, "http://a/").as_deref(), Some("http://p:1/"));
    }

    #[test]
    fn some_hosts_are_reached_without_a_proxy() {
        let all = proxies(&[
            ("all_proxy", "http://p:1"),
            (
                "no_proxy",
                "localhost, .corp.example,*.x.org,10.0.0.0/8,h:8080,[fd00::1],fd01::/16",
            ),
        ]);
        for (url, with) in [
            ("http://localhost/", false),
            ("http://notlocalhost/", true),
            ("https://a.corp.example/", false),
            ("https://corp.example/", false),
            ("https://evilcorp.example/", true),
            ("https://b.X.org/", false),
            ("http://10.1.2.3/", false),
            ("http://11.1.2.3/", true),
            ("http://h:8080/", false),
            ("http://h:81/", true),
            ("http://[fd00::1]/", false),
            ("http://[fd01::7]/", false),
            ("http://[fd02::7]/", true),
        ] {
            assert_eq!(chosen(&all, url).is_some(), with, "{url}");
        }
        let all = proxies(&[("all_proxy", "http://p:1"), ("NO_PROXY", "*")]);
        assert_eq!(chosen(&all, "http://a/"), None);
    }
}
