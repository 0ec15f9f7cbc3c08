//! An origin on Redis.

#[cfg(test)]
mod equality;
mod wire;

/// The script.
const SOURCE: &str = include_str!("transition.lua");
