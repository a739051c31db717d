//! Settings with a few values, each of which has one name: commands, Python, logs and the record of a
//! session all spell it the same.

/// A setting that is chosen by name.
pub trait Named: Copy + PartialEq + 'static {
    /// Every value, its name, and what it means.
    const VALUES: &'static [(Self, &'static str, &'static str)];

    /// The name of this value.
    fn name(self) -> &'static str {
        let of = |(value, name, _): &(Self, &'static str, _)| (*value == self).then_some(*name);
        Self::VALUES.iter().find_map(of).unwrap_or_default()
    }

    /// The value of that name.
    fn named(name: &str) -> Option<Self> {
        let of = |(value, known, _): &(Self, &str, _)| (*known == name).then_some(*value);
        Self::VALUES.iter().find_map(of)
    }
}
