//! The command line.

use tidegate_core::Algorithm;
use tidegate_oracle::Plan;

pub(crate) const USAGE: &str = "usage: tidegate-oracle [--decisions N] [--seed N] [--threads N] \
                                [--algorithm gcra|window|both] [--json]";

/// The parsed arguments.
#[derive(Clone, Debug)]
pub(crate) struct Args {
    pub(crate) plan: Plan,
    pub(crate) algorithms: Vec<Algorithm>,
    pub(crate) json: bool,
}

impl Default for Args {
    fn default() -> Self {
        Self {
            plan: Plan { seed: 1, decisions: 1_000_000, threads: 2 },
            algorithms: vec![Algorithm::Gcra, Algorithm::SlidingWindow],
            json: false,
        }
    }
}

impl Args {
    /// Reads the arguments after the program's name.
    pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut args = Self::default();
        while let Some(flag) = words.next() {
            if flag == "--json" {
                args.json = true;
                continue;
            }
            let value =
                words.next().ok_or_else(|| format!("{flag}: no such flag, or its value is missing"))?;
            args.set(&flag, &value)?;
        }
        Ok(args)
    }

    fn set(&mut self, flag: &str, value: &str) -> Result<(), String> {
        match flag {
            "--decisions" => self.plan.decisions = number(flag, value)?,
            "--seed" => self.plan.seed = number(flag, value)?,
            "--threads" => self.plan.threads = number(flag, value)?,
            "--algorithm" => self.algorithms = algorithms(value)?,
            _ => return Err(format!("{flag}: no such flag")),
        }
        Ok(())
    }
}

fn number<T: std::str::FromStr>(flag: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{flag}: {value:?} is not a whole number in range"))
}

fn algorithms(value: &str) -> Result<Vec<Algorithm>, String> {
    match value {
        "gcra" => Ok(vec![Algorithm::Gcra]),
        "window" => Ok(vec![Algorithm::SlidingWindow]),
        "both" => Ok(vec![Algorithm::Gcra, Algorithm::SlidingWindow]),
        _ => Err(format!("--algorithm: {value:?} is none of gcra, window and both")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, String> {
        Args::parse(line.split_whitespace().map(String::from))
    }

    #[test]
    fn every_flag_is_taken() {
        let args = parse("--decisions 5 --seed 6 --threads 7 --algorithm window --json").unwrap();
        let Plan { seed, decisions, threads } = args.plan;
        assert_eq!((decisions, seed, threads), (5, 6, 7));
        assert_eq!((args.algorithms, args.json), (vec![Algorithm::SlidingWindow], true));
    }

    #[test]
    fn mistakes_are_named() {
        for (line, error) in [
            ("--seed -1", "--seed: \"-1\" is not a whole number in range"),
            ("--seed", "--seed: no such flag, or its value is missing"),
            ("--speed 1", "--speed: no such flag"),
            ("--algorithm x", "--algorithm: \"x\" is none of gcra, window and both"),
        ] {
            assert_eq!(parse(line).unwrap_err(), error);
        }
    }
}
