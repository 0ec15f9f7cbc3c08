//! Components as bytes.

use tidegate_core::origin::{Component, ComponentTotals, Terms};

use super::WireError;
use super::bytes::{NUMBER_BYTES_MAX, Reader, number_len, put_number, put_text, text_len};

/// Maximum bytes of a meter's name. Every surface accepts only shorter requests, and so only
/// shorter keys.
const KEY_BYTES_MAX: usize = 512 << 10;

/// How many numbers terms are.
const TERMS: usize = 12;

/// The numbers of a component beside its key and its length: terms, incarnation, sums.
const NUMBERS: usize = TERMS + 1 + 3;

/// The largest component that can be carried. Others stay at home, and are counted.
pub const COMPONENT_BYTES_MAX: usize = KEY_BYTES_MAX + (NUMBERS + 1) * NUMBER_BYTES_MAX;

fn numbers(component: &Component) -> impl Iterator<Item = u64> {
    let totals = component.totals.numbers();
    component.terms.numbers().into_iter().chain([component.incarnation]).chain(totals)
}

/// How many bytes a component takes.
pub fn component_len(component: &Component) -> usize {
    text_len(&component.key) + numbers(component).map(number_len).sum::<usize>()
}

pub(super) fn put(bytes: &mut Vec<u8>, component: &Component) {
    put_text(bytes, &component.key);
    numbers(component).for_each(|number| put_number(bytes, number));
}

pub(super) fn get(reader: &mut Reader<'_>) -> Result<Component, WireError> {
    let key = reader.text("key", KEY_BYTES_MAX)?.into();
    let terms = Terms::of_numbers(several(reader)?).ok_or(WireError::Terms)?;
    let incarnation = reader.number()?;
    let totals = ComponentTotals::of_numbers(terms.algorithm(), several(reader)?);
    Ok(Component { key, terms, incarnation, totals })
}

fn several<const N: usize>(reader: &mut Reader<'_>) -> Result<[u64; N], WireError> {
    let mut numbers = [0; N];
    for number in &mut numbers {
        *number = reader.number()?;
    }
    Ok(numbers)
}
