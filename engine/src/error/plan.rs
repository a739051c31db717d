/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Not a profile.
    #[error("the profile is wrong at {at}: {why}; see docs/PLAN.md")]
    Profile {
        /// The field.
        at: String,
        /// What is wrong, and in which line.
        why: String,
    },
    /// A number that is none of a host or link.
    #[error("the profile is wrong at {at}: {what} is {value}; it must be {must}")]
    Value {
        /// The field.
        at: String,
        /// What it says.
        what: &'static str,
        /// The value.
        value: String,
        /// What it may be.
        must: String,
    },
    /// Two hosts of one name.
    #[error(
        "the profile has two hosts named \"{name}\", the second at {at}; give each its own name"
    )]
    Twice {
        /// The second one.
        at: String,
        /// The name.
        name: String,
    },
    /// Two links between the same hosts.
    #[error(
        "the profile has two links from \"{from}\" to \"{to}\", the second at {at}; leave one out"
    )]
    LinkTwice {
        /// The second one.
        at: String,
        /// From here.
        from: String,
        /// To here.
        to: String,
    },
    /// A host that nobody has described.
    #[error("{at} names the host \"{name}\", which the profile does not have")]
    Unknown {
        /// Who says so.
        at: String,
        /// The name.
        name: String,
    },
    /// More than is planned for.
    #[error("the profile has {count} {what}, above the limit of {limit}; plan parts of it")]
    TooMany {
        /// Hosts, links or aggregators.
        what: &'static str,
        /// How many.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// A file that is longer than a profile can be.
    #[error("the profile has {bytes} bytes, above the limit of {limit}; name a profile")]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Nobody trains.
    #[error("no host of the profile is a client; give those that train \"client\": true")]
    NoClients,
    /// Nobody averages.
    #[error(
        "no host of the profile is an aggregator; give those that may average \"aggregator\": true"
    )]
    NoAggregators,
    /// Aggregators without memory.
    #[error(
        "no aggregator has the {wanted} bytes of memory that the model takes; the most is {most} on \"{name}\""
    )]
    Memory {
        /// What an aggregator needs.
        wanted: u64,
        /// The most that one has.
        most: u64,
        /// That one.
        name: String,
    },
    /// A client without memory for a ring or chain.
    #[error(
        "a {topology} takes {wanted} bytes of memory on every client, and \"{name}\" has {most}"
    )]
    RowMemory {
        /// The shape.
        topology: &'static str,
        /// What a client needs.
        wanted: u64,
        /// What this one has.
        most: u64,
        /// The client.
        name: String,
    },
    /// A client that is cut off.
    #[error("client \"{name}\" reaches no aggregator: all its links are 0")]
    CutOff {
        /// The client.
        name: String,
    },
    /// Clients for whom there is no room.
    #[error(
        "{topology} has no place for all {clients} clients: look at \"max_clients\" and at links that are 0"
    )]
    NoPlace {
        /// The shape.
        topology: &'static str,
        /// How many.
        clients: usize,
    },
    /// A ring or chain that cannot be.
    #[error("a {topology} takes from 2 to {limit} clients, not {clients}")]
    Size {
        /// The shape.
        topology: &'static str,
        /// The most.
        limit: usize,
        /// How many there are.
        clients: usize,
    },
    /// Hosts that cannot stand in a row.
    #[error(
        "there is no order in which all clients of a {topology} reach the next one: some links are 0"
    )]
    NoOrder {
        /// The shape.
        topology: &'static str,
    },
    /// Nothing to move.
    #[error("a model of {bytes} bytes takes no plan; it must have from 1 to {limit}")]
    Model {
        /// Its size.
        bytes: u64,
        /// The most.
        limit: u64,
    },
    /// A measurement that says nothing.
    #[error(
        "line {line} of the measurements is wrong: {why}; they are what `--json` prints, a line each"
    )]
    Measured {
        /// Which one.
        line: usize,
        /// What is wrong.
        why: String,
    },
}
