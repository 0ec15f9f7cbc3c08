//! Where a store is: a file, this process's memory, or a `PostgreSQL` server.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use sqlx::postgres::PgConnectOptions;

/// Where a store is. Shown without its password.
#[derive(Clone)]
pub struct Address(pub(super) StoreLocation);

#[derive(Clone)]
pub(super) enum StoreLocation {
    Memory,
    File(PathBuf),
    /// A file in the data folder of one server, which no other process opens.
    Embedded(PathBuf),
    Postgres(Box<PgConnectOptions>),
}

/// A text that is no address of a store. It does not repeat the text, which may hold a password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidAddress(String);

impl fmt::Display for InvalidAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "must be `sqlite:FILE`, `sqlite::memory:` or `postgres://USER:PASSWORD@HOST:PORT/DATABASE`{}",
            self.0
        )
    }
}

impl std::error::Error for InvalidAddress {}

impl FromStr for Address {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, InvalidAddress> {
        if let Some(file) = text.strip_prefix("sqlite:") {
            return match file {
                "" => Err(InvalidAddress(": the file has no name".to_owned())),
                file if file.contains('?') => Err(InvalidAddress(": a file has no parameters".to_owned())),
                ":memory:" => Ok(Self(StoreLocation::Memory)),
                file => Ok(Self(StoreLocation::File(file.strip_prefix("//").unwrap_or(file).into()))),
            };
        }
        if !text.starts_with("postgres://") && !text.starts_with("postgresql://") {
            return Err(InvalidAddress(String::new()));
        }
        // The error of the parser would repeat parts of the address.
        let options =
            text.parse().map_err(|_| InvalidAddress(": this is no PostgreSQL address".to_owned()))?;
        Ok(Self(StoreLocation::Postgres(Box::new(options))))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            StoreLocation::Memory => f.write_str("sqlite::memory:"),
            StoreLocation::File(file) => write!(f, "sqlite:{}", file.display()),
            StoreLocation::Embedded(folder) => write!(f, "data_dir: {}", folder.display()),
            StoreLocation::Postgres(options) => {
                let (user, host, port) = (options.get_username(), options.get_host(), options.get_port());
                write!(f, "postgres://{user}@{host}:{port}/{}", options.get_database().unwrap_or(user))
            }
        }
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_without_its_password() {
        let address: Address =
            "postgres://ada:se%63ret@db.example:5433/rules?sslmode=require".parse().expect("one");
        assert_eq!(address.to_string(), "postgres://ada@db.example:5433/rules");
        assert_eq!(format!("{address:?}"), "postgres://ada@db.example:5433/rules");
        for text in ["sqlite:/var/lib/tidegate/rules.db", "sqlite:rules.db", "sqlite::memory:"] {
            assert_eq!(text.parse::<Address>().expect("one").to_string(), text);
        }
    }

    #[test]
    fn invalid_address_is_not_echoed_in_its_error() {
        for text in [
            "",
            "rules.toml",
            "sqlite:",
            "sqlite:a.db?mode=rwc",
            "mysql://a:secret@b/c",
            "postgres://a:secret@b:x/c",
        ] {
            let problem = text.parse::<Address>().expect_err(text).to_string();
            assert!(
                problem.starts_with("must be `sqlite:FILE`, ") && !problem.contains("secret"),
                "{problem}"
            );
        }
    }
}
