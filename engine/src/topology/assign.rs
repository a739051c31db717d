//! Which client sends to which aggregator, and which of these is the root, so that a star or tree takes the
//! least time.
//!
//! An aggregator is done when the slowest of its clients is, or when all their bytes have passed its link. So
//! for given deadlines X of all sums and Y of all means, whether there is a plan is a question of flow: client
//! i may go to a if it is fast enough alone, and a takes so many clients as fit its link in that time. The
//! smallest X, the smallest Y, and the smallest Y for some X between are found by halving. What that leaves out
//! is how edges share the root's link; so the best of these plans are then improved under the whole model, by
//! moving a client or swapping two. Up to [`limits::EXACT_CLIENTS`] clients all plans are tried, leaving out
//! what is slower already than the best so far.
//!
//! A solver for linear programs (HiGHS, microlp) was weighed: with the sum of two maxima for each pair of root
//! and aggregator it needs whole numbers, takes seconds to minutes for 32,000 of them, and brings a C++ build or
//! a dense tableau. The flow here has unit weights on one side, and is short.

use super::cost::Network;
use crate::limits;

/// Those who train and those who may average, as places in the profile, in its order.
#[derive(Clone, Debug)]
pub(super) struct Parties {
    pub clients: Vec<usize>,
    pub aggregators: Vec<usize>,
    /// Most clients and edges of each aggregator.
    pub room: Vec<usize>,
}

/// A star or tree: its root, and the aggregator of each client, as numbers in [`Parties`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    pub root: usize,
    pub of: Vec<usize>,
}

/// What the formulas of [`super::cost`] say of clients and aggregators, by number.
pub(super) struct Table<'a> {
    network: &'a Network,
    parties: &'a Parties,
    /// Seconds of an update from a client to an aggregator, and of the mean back.
    up: Vec<f64>,
    down: Vec<f64>,
    /// The same between an edge and a root, by edge and root; of sums on the way up.
    edge_up: Vec<f64>,
    edge_down: Vec<f64>,
}

/// What an evaluation needs to know of the clients of one aggregator.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Group {
    clients: usize,
    /// Whether one of them is on the aggregator's own host.
    own: bool,
    slowest_up: f64,
    slowest_down: f64,
}

impl Group {
    fn with(self, table: &Table<'_>, client: usize, aggregator: usize) -> Group {
        Group {
            clients: self.clients + 1,
            own: self.own || table.is_own(client, aggregator),
            slowest_up: self.slowest_up.max(table.up(client, aggregator)),
            slowest_down: self.slowest_down.max(table.down(client, aggregator)),
        }
    }
}

impl<'a> Table<'a> {
    pub fn new(network: &'a Network, parties: &'a Parties) -> Table<'a> {
        let (model, sums) = (network.model().bytes as f64, network.model().sum_bytes as f64);
        let all = |from: &[usize], bytes: f64, up: bool| {
            let pairs =
                from.iter().flat_map(|&host| parties.aggregators.iter().map(move |&to| (host, to)));
            let seconds = pairs.map(|(host, to)| match up {
                true => network.alone_s(host, to, bytes),
                false => network.alone_s(to, host, bytes),
            });
            seconds.collect::<Vec<f64>>()
        };
        Table {
            network,
            parties,
            up: all(&parties.clients, model, true),
            down: all(&parties.clients, model, false),
            edge_up: all(&parties.aggregators, sums, true),
            edge_down: all(&parties.aggregators, model, false),
        }
    }

    fn aggregators(&self) -> usize {
        self.parties.aggregators.len()
    }

    fn clients(&self) -> usize {
        self.parties.clients.len()
    }

    fn up(&self, client: usize, aggregator: usize) -> f64 {
        self.up[client * self.aggregators() + aggregator]
    }

    fn down(&self, client: usize, aggregator: usize) -> f64 {
        self.down[client * self.aggregators() + aggregator]
    }

    fn edge_up(&self, edge: usize, root: usize) -> f64 {
        self.edge_up[edge * self.aggregators() + root]
    }

    fn edge_down(&self, edge: usize, root: usize) -> f64 {
        self.edge_down[edge * self.aggregators() + root]
    }

    fn is_own(&self, client: usize, aggregator: usize) -> bool {
        self.parties.clients[client] == self.parties.aggregators[aggregator]
    }

    /// Whether a client and an aggregator reach each other.
    fn reaches(&self, client: usize, aggregator: usize) -> bool {
        self.up(client, aggregator).is_finite() && self.down(client, aggregator).is_finite()
    }

    /// A client that reaches nobody.
    pub fn cut_off(&self) -> Option<usize> {
        let reaches = |client: usize| (0..self.aggregators()).any(|to| self.reaches(client, to));
        (0..self.clients()).find(|&client| !reaches(client))
    }

    /// The clients of an aggregator but one.
    fn group_without(&self, of: &[usize], aggregator: usize, but: usize) -> Group {
        let clients = of.iter().enumerate();
        let left = clients.filter(|&(client, &to)| to == aggregator && client != but);
        left.fold(Group::default(), |group, (client, _)| group.with(self, client, aggregator))
    }

    fn groups(&self, of: &[usize]) -> Vec<Group> {
        let mut groups = vec![Group::default(); self.aggregators()];
        for (client, &to) in of.iter().enumerate() {
            groups[to] = groups[to].with(self, client, to);
        }
        groups
    }

    /// Seconds of a round, as [`Network::tree`] says it.
    pub fn seconds(&self, placement: &Placement) -> f64 {
        self.worth(placement.root, &self.groups(&placement.of), &mut Vec::new()).0
    }

    /// Seconds of a round, and the sum of what all aggregators take: it tells apart those that are alike.
    /// Infinite where there is no way or no room.
    fn worth(&self, root: usize, groups: &[Group], late: &mut Vec<f64>) -> (f64, f64) {
        let (model, sums) =
            (self.network.model().bytes as f64, self.network.model().sum_bytes as f64);
        let own = |group: &Group| if group.own { model } else { 0.0 };
        let host = self.parties.aggregators[root];
        let direct = &groups[root];
        let edges = (0..groups.len()).filter(|&edge| edge != root && groups[edge].clients > 0);
        let below = edges.clone().count() + direct.clients;
        let share = self.network.sending_s(host, below as f64 * model, own(direct));
        let crowded = below > self.parties.room[root]
            || edges.clone().any(|edge| groups[edge].clients > self.parties.room[edge]);
        if crowded {
            return (f64::INFINITY, f64::INFINITY);
        }
        let (mut ready, mut have, mut sum) = (direct.slowest_up, 0.0_f64, 0.0);
        if direct.clients > 0 {
            have = share.max(direct.slowest_down);
        }
        late.clear();
        for edge in edges {
            let group = &groups[edge];
            let (at, bytes) = (self.parties.aggregators[edge], group.clients as f64 * model);
            let up = self.network.receiving_s(at, bytes, own(group)).max(group.slowest_up);
            let down = self.network.sending_s(at, bytes, own(group)).max(group.slowest_down);
            late.push(up);
            ready = ready.max(up + self.edge_up(edge, root));
            have = have.max(share.max(self.edge_down(edge, root)) + down);
            sum += (up + down).min(1e12).powi(2);
        }
        late.sort_by(|a, b| b.total_cmp(a));
        let mut bytes = 0.0;
        for begins in late.iter() {
            bytes += sums;
            ready = ready.max(begins + self.network.receiving_s(host, bytes, 0.0));
        }
        bytes += direct.clients as f64 * model;
        ready = ready.max(self.network.receiving_s(host, bytes, own(direct)));
        (ready + have, sum + (ready + have).min(1e12))
    }
}

/// Clients dealt out in turn to all aggregators, the first of which is the root: what is done without a profile.
pub(super) fn round_robin(parties: &Parties) -> Placement {
    let aggregators = parties.aggregators.len();
    Placement {
        root: 0,
        of: (0..parties.clients.len()).map(|client| client % aggregators).collect(),
    }
}

/// A placement that takes little time, or none where there is no way for all.
pub(super) fn best(table: &Table<'_>, exact: bool) -> Option<Placement> {
    let mut found = candidates(table);
    found.push(round_robin(table.parties));
    found.sort_by(|a, b| table.seconds(a).total_cmp(&table.seconds(b)));
    found.dedup();
    let mut tries = TRIES;
    let improved = found.into_iter().take(STARTS).map(|start| improve(table, start, &mut tries));
    let best = improved.min_by(|a, b| table.seconds(a).total_cmp(&table.seconds(b)))?;
    let small = table.clients() <= limits::EXACT_CLIENTS
        && table.aggregators() <= limits::EXACT_AGGREGATORS;
    let best = if exact && small { exhaust(table, best) } else { best };
    table.seconds(&best).is_finite().then_some(best)
}

/// Placements that are improved.
const STARTS: usize = 6;

/// Changes that are tried in all: some tenths of a second.
const TRIES: usize = 1 << 19;

/// Pairs of a client and an aggregator that are looked at in all while candidates are found: the same.
const LOOKS: usize = 100 << 20;

/// Times that a deadline is halved in: to a thousandth.
const HALVINGS: usize = 10;

/// Deadlines of sums that are tried with each root.
const DEADLINES: usize = 6;

/// Placements for some roots and some sets of aggregators, by flow.
fn candidates(table: &Table<'_>) -> Vec<Placement> {
    let mut looks = LOOKS;
    let mut found = Vec::new();
    let roots = roots(table);
    for size in sizes(table.aggregators()) {
        for &root in &roots {
            for used in sets(table, root, size) {
                let mut flow = Flow { table, root, used, looks: &mut looks };
                found.extend(flow.placements());
            }
        }
    }
    found
}

/// The roots that are tried: those that take the least time if every client goes to the nearest aggregator.
fn roots(table: &Table<'_>) -> Vec<usize> {
    let way = |client: usize, to: usize| table.up(client, to) + table.down(client, to);
    let nearest = |client: usize| {
        let all = 0..table.aggregators();
        all.min_by(|&a, &b| way(client, a).total_cmp(&way(client, b))).unwrap_or(0)
    };
    let groups = table.groups(&(0..table.clients()).map(nearest).collect::<Vec<_>>());
    let mut late = Vec::new();
    let worth = (0..table.aggregators()).map(|root| (table.worth(root, &groups, &mut late), root));
    let mut roots: Vec<_> = worth.collect();
    roots.sort_by(|a, b| a.0.0.total_cmp(&b.0.0).then(a.0.1.total_cmp(&b.0.1)));
    roots.into_iter().take(ROOTS).map(|(_, root)| root).collect()
}

/// Roots that are tried.
const ROOTS: usize = 8;

/// How many aggregators are used: all first, for that is often right.
fn sizes(aggregators: usize) -> Vec<usize> {
    if aggregators <= limits::EXACT_AGGREGATORS + 1 {
        return (1..=aggregators).rev().collect();
    }
    let mut sizes: Vec<usize> = std::iter::successors(Some(aggregators), |size| Some(size * 2 / 3))
        .take_while(|&size| size > 0)
        .collect();
    sizes.dedup();
    sizes
}

/// Sets of so many aggregators with that root: all of them where there are few, else those that move most.
fn sets(table: &Table<'_>, root: usize, size: usize) -> Vec<Vec<usize>> {
    let mut others: Vec<usize> = (0..table.aggregators()).filter(|&edge| edge != root).collect();
    if table.aggregators() > limits::EXACT_AGGREGATORS + 1 {
        let model = table.network.model().bytes as f64;
        let cost = |edge: usize| {
            let host = table.parties.aggregators[edge];
            let way = table.edge_up(edge, root) + table.edge_down(edge, root);
            let each = table.clients() as f64 / size as f64 * model;
            let own = table.network.receiving_s(host, each, 0.0)
                + table.network.sending_s(host, each, 0.0);
            way + own
        };
        others.sort_by(|&a, &b| cost(a).total_cmp(&cost(b)));
        others.truncate(size - 1);
        others.push(root);
        return vec![others];
    }
    let chosen = (0_usize..1 << others.len()).filter(|bits| bits.count_ones() as usize == size - 1);
    let pick = |bits: usize| {
        let picked = others.iter().enumerate().filter(|(place, _)| bits >> place & 1 == 1);
        picked.map(|(_, &edge)| edge).chain([root]).collect()
    };
    chosen.map(pick).collect()
}

/// Asks whether clients fit aggregators in given times.
struct Flow<'a> {
    table: &'a Table<'a>,
    root: usize,
    used: Vec<usize>,
    looks: &'a mut usize,
}

impl Flow<'_> {
    /// Placements between the fastest sums and the fastest means.
    fn placements(&mut self) -> Vec<Placement> {
        let root = self.root;
        let place = |of| Placement { root, of };
        let work = self.table.clients() * self.used.len();
        if *self.looks < work {
            return Vec::new();
        }
        *self.looks -= work;
        let Some((least_up, first)) = self.shortest(|up| (up, f64::INFINITY)) else {
            return Vec::new();
        };
        let Some((least_down, last)) = self.shortest(|down| (f64::INFINITY, down)) else {
            return Vec::new();
        };
        let mut found = vec![place(first), place(last)];
        for step in 0..DEADLINES {
            let up = least_up * (1.0 + 0.3 * (step * step) as f64 / DEADLINES as f64);
            let Some((down, of)) = self.shortest(|down| (up, down)) else { continue };
            found.push(place(of));
            if down <= least_down {
                break;
            }
        }
        found
    }

    /// The shortest time for which there is a placement with the deadlines that `of` makes of it.
    fn shortest(&mut self, of: impl Fn(f64) -> (f64, f64)) -> Option<(f64, Vec<usize>)> {
        let mut low = 0.0;
        let mut high = self.scale();
        let mut best = loop {
            let (up, down) = of(high);
            match self.fit(up, down) {
                Some(found) => break found,
                None if high > 1e15 => return None,
                None => (low, high) = (high, high * 4.0),
            }
        };
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            let (up, down) = of(middle);
            match self.fit(up, down) {
                Some(found) => (best, high) = (found, middle),
                None => low = middle,
            }
        }
        Some((high, best))
    }

    /// A time near those that are asked for, so that halving begins close.
    fn scale(&self) -> f64 {
        let table = self.table;
        let nearest = |client: usize| {
            let ways = self.used.iter().map(|&to| table.up(client, to).min(table.down(client, to)));
            ways.fold(f64::INFINITY, f64::min)
        };
        let finite = (0..table.clients()).map(nearest).filter(|seconds| seconds.is_finite());
        finite.fold(1e-9, f64::max)
    }

    /// Clients and times that an aggregator has, if all sums must be ready at `up` and the mean everywhere
    /// `down` after that.
    fn offer(&self, aggregator: usize, up: f64, down: f64) -> (usize, f64, f64) {
        let (table, root) = (self.table, self.root);
        let network = table.network;
        let (model, sums) = (network.model().bytes as f64, network.model().sum_bytes as f64);
        let edges = (self.used.len() - 1) as f64;
        let host = table.parties.aggregators[root];
        let at = table.parties.aggregators[aggregator];
        let (up, down, room) = if aggregator == root {
            // Its link also carries the edges' sums and the means for them.
            let up = up - network.receiving_s(host, edges * sums, 0.0);
            (
                up,
                down - network.sending_s(host, edges * model, 0.0),
                table.parties.room[root] as f64 - edges,
            )
        } else {
            let (all_up, all_down) = (edges * sums, edges * model);
            let up =
                up - table.edge_up(aggregator, root).max(network.receiving_s(host, all_up, 0.0));
            let down = down
                - table.edge_down(aggregator, root).max(network.sending_s(host, all_down, 0.0));
            (up, down, table.parties.room[aggregator] as f64)
        };
        let taken = network.receiving_s(at, model, 0.0);
        let given = network.sending_s(at, model, 0.0);
        let fit =
            |time: f64, each: f64| if each > 0.0 { (time / each).floor() } else { f64::INFINITY };
        let most = room.min(fit(up, taken)).min(fit(down, given));
        // Saturates: nothing below zero, and no more than there are.
        ((most as usize).min(table.clients()), up, down)
    }

    /// A placement within these times.
    fn fit(&mut self, up: f64, down: f64) -> Option<Vec<usize>> {
        let table = self.table;
        let offers: Vec<_> = self.used.iter().map(|&to| (to, self.offer(to, up, down))).collect();
        let most: usize = offers.iter().map(|(_, offer)| offer.0).sum();
        let work = table.clients() * offers.len();
        if most < table.clients() || *self.looks < work {
            return None;
        }
        *self.looks -= work;
        let allowed = |client: usize, place: usize| {
            let (to, (_, up, down)) = offers[place];
            table.up(client, to) <= up && table.down(client, to) <= down
        };
        let room: Vec<usize> = offers.iter().map(|(_, offer)| offer.0).collect();
        let cost = |client: usize, place: usize| {
            let (to, _) = offers[place];
            table.up(client, to) + table.down(client, to)
        };
        let places = matching(table.clients(), &room, allowed, cost)?;
        Some(places.into_iter().map(|place| offers[place].0).collect())
    }
}

/// Gives every client a place that it is allowed and no place more clients than it has room for, by augmenting
/// paths (L. Ford and D. Fulkerson, 1956).
fn matching(
    clients: usize,
    room: &[usize],
    allowed: impl Fn(usize, usize) -> bool,
    cost: impl Fn(usize, usize) -> f64,
) -> Option<Vec<usize>> {
    let mut at: Vec<usize> = Vec::with_capacity(clients);
    let mut held: Vec<Vec<usize>> = vec![Vec::new(); room.len()];
    for client in 0..clients {
        let ways = (0..room.len()).filter(|&place| allowed(client, place));
        let free = ways.filter(|&place| held[place].len() < room[place]);
        let near = free.min_by(|&a, &b| cost(client, a).total_cmp(&cost(client, b)));
        let place = match near {
            Some(place) => place,
            None => make_room(client, &mut at, &mut held, room, &allowed)?,
        };
        held[place].push(client);
        at.push(place);
    }
    Some(at)
}

/// Moves clients along a path that ends at a free place, so that there is a place for one more.
fn make_room(
    client: usize,
    at: &mut [usize],
    held: &mut [Vec<usize>],
    room: &[usize],
    allowed: &impl Fn(usize, usize) -> bool,
) -> Option<usize> {
    // How each place was reached: by which client, from which place.
    let mut came: Vec<Option<(usize, usize)>> = vec![None; room.len()];
    let mut first = vec![false; room.len()];
    let mut queue: Vec<usize> = (0..room.len()).filter(|&place| allowed(client, place)).collect();
    queue.iter().for_each(|&place| first[place] = true);
    let mut next = 0;
    while next < queue.len() {
        let place = queue[next];
        next += 1;
        if held[place].len() < room[place] {
            return Some(shift(place, at, held, &came));
        }
        for &mover in &held[place] {
            for to in 0..room.len() {
                if !first[to] && came[to].is_none() && allowed(mover, to) {
                    came[to] = Some((mover, place));
                    queue.push(to);
                }
            }
        }
    }
    None
}

/// Moves the clients of a path; gives its beginning, where there is room then.
fn shift(
    mut end: usize,
    at: &mut [usize],
    held: &mut [Vec<usize>],
    came: &[Option<(usize, usize)>],
) -> usize {
    while let Some((mover, from)) = came[end] {
        held[from].retain(|&other| other != mover);
        held[end].push(mover);
        at[mover] = end;
        end = from;
    }
    end
}

/// Moves and swaps clients until nothing helps, or `tries` are used up.
fn improve(table: &Table<'_>, start: Placement, tries: &mut usize) -> Placement {
    let groups = table.groups(&start.of);
    let mut late = Vec::new();
    let worth = table.worth(start.root, &groups, &mut late);
    let mut local = Local { table, placement: start, groups, worth, late, tries };
    while local.sweep() {}
    local.placement
}

struct Local<'a> {
    table: &'a Table<'a>,
    placement: Placement,
    groups: Vec<Group>,
    worth: (f64, f64),
    late: Vec<f64>,
    tries: &'a mut usize,
}

impl Local<'_> {
    /// Tries every change once; whether one of them helped.
    fn sweep(&mut self) -> bool {
        let mut helped = false;
        let (clients, aggregators) = (self.table.clients(), self.table.aggregators());
        for root in 0..aggregators {
            let was = std::mem::replace(&mut self.placement.root, root);
            helped |= self.helps() || {
                self.placement.root = was;
                false
            };
        }
        for client in 0..clients {
            for to in 0..aggregators {
                helped |= self.moves(client, to);
            }
        }
        for a in 0..clients {
            for b in a + 1..clients {
                helped |= self.swaps(a, b);
            }
        }
        helped && *self.tries > 0
    }

    /// Whether what was changed is better than before.
    fn helps(&mut self) -> bool {
        *self.tries = self.tries.saturating_sub(1);
        let worth = self.table.worth(self.placement.root, &self.groups, &mut self.late);
        let helps = *self.tries > 0 && is_less(worth, self.worth);
        if helps {
            self.worth = worth;
        }
        helps
    }

    fn moves(&mut self, client: usize, to: usize) -> bool {
        let from = self.placement.of[client];
        if *self.tries == 0 || to == from || !self.table.reaches(client, to) {
            return false;
        }
        let kept = (self.groups[from], self.groups[to]);
        self.groups[to] = kept.1.with(self.table, client, to);
        self.groups[from] = self.without(client, from);
        self.placement.of[client] = to;
        if self.helps() {
            return true;
        }
        self.placement.of[client] = from;
        (self.groups[from], self.groups[to]) = kept;
        false
    }

    fn swaps(&mut self, a: usize, b: usize) -> bool {
        let (at_a, at_b) = (self.placement.of[a], self.placement.of[b]);
        let can = at_a != at_b && self.table.reaches(a, at_b) && self.table.reaches(b, at_a);
        if *self.tries == 0 || !can {
            return false;
        }
        let kept = (self.groups[at_a], self.groups[at_b]);
        self.groups[at_a] = self.without(a, at_a).with(self.table, b, at_a);
        self.groups[at_b] = self.without(b, at_b).with(self.table, a, at_b);
        (self.placement.of[a], self.placement.of[b]) = (at_b, at_a);
        if self.helps() {
            return true;
        }
        (self.placement.of[a], self.placement.of[b]) = (at_a, at_b);
        (self.groups[at_a], self.groups[at_b]) = kept;
        false
    }

    /// The group of an aggregator that `client` has left. Only what it set itself has to be found anew.
    fn without(&self, client: usize, aggregator: usize) -> Group {
        let (table, group) = (self.table, self.groups[aggregator]);
        let sets = table.is_own(client, aggregator)
            || table.up(client, aggregator) >= group.slowest_up
            || table.down(client, aggregator) >= group.slowest_down;
        match sets {
            true => table.group_without(&self.placement.of, aggregator, client),
            false => Group { clients: group.clients - 1, ..group },
        }
    }
}

/// Seconds that differ by rounding only are the same.
fn is_less(a: (f64, f64), b: (f64, f64)) -> bool {
    let same = a.0 == b.0 || (a.0 - b.0).abs() <= 1e-12 * b.0.abs();
    if same { a.1 < b.1 * (1.0 - 1e-12) } else { a.0 < b.0 }
}

/// Tries all placements that are not slower than `best` before they are whole.
fn exhaust(table: &Table<'_>, best: Placement) -> Placement {
    let mut search = Exhaust { table, seconds: table.seconds(&best), best, late: Vec::new() };
    for root in 0..table.aggregators() {
        let mut groups = vec![Group::default(); table.aggregators()];
        search.extend(root, &mut Vec::new(), &mut groups);
    }
    search.best
}

struct Exhaust<'a> {
    table: &'a Table<'a>,
    best: Placement,
    seconds: f64,
    late: Vec<f64>,
}

impl Exhaust<'_> {
    /// Each client more makes no round shorter, so what is too slow already is left out.
    fn extend(&mut self, root: usize, of: &mut Vec<usize>, groups: &mut Vec<Group>) {
        let table = self.table;
        if of.len() == table.clients() {
            let seconds = table.worth(root, groups, &mut self.late).0;
            if seconds < self.seconds {
                (self.seconds, self.best) = (seconds, Placement { root, of: of.clone() });
            }
            return;
        }
        for to in 0..table.aggregators() {
            let was = groups[to];
            groups[to] = was.with(table, of.len(), to);
            if table.worth(root, groups, &mut self.late).0 < self.seconds {
                of.push(to);
                self.extend(root, of, groups);
                of.pop();
            }
            groups[to] = was;
        }
    }
}

/// What no placement is faster than: the fastest sums and the fastest means that flow allows for each root, if
/// edges would not get in each other's way.
pub(super) fn lower_bound(table: &Table<'_>) -> f64 {
    let bound = |root: Option<usize>| bound_of(table, root, true) + bound_of(table, root, false);
    let aggregators = table.aggregators();
    if table.clients() * aggregators * aggregators > BOUND_LOOKS {
        // With a root that is everywhere, which is a little faster still.
        return bound(None);
    }
    (0..aggregators).map(|root| bound(Some(root))).fold(f64::INFINITY, f64::min)
}

/// Clients times aggregators times roots for which each root has a bound of its own.
const BOUND_LOOKS: usize = 1 << 21;

/// The least time, to a thousandth, of all sums or of all means with a root.
fn bound_of(table: &Table<'_>, root: Option<usize>, up: bool) -> f64 {
    let model = table.network.model().bytes as f64;
    let alone = |client: usize, to: usize| match up {
        true => table.up(client, to),
        false => table.down(client, to),
    };
    let way = |to: usize| match root {
        Some(root) if root != to && up => table.edge_up(to, root),
        Some(root) if root != to => table.edge_down(to, root),
        _ => 0.0,
    };
    let each = table.parties.aggregators.iter().map(|&host| match up {
        true => table.network.receiving_s(host, model, 0.0),
        false => table.network.sending_s(host, model, 0.0),
    });
    let each: Vec<f64> = each.collect();
    // A client on the same host takes nothing of the link.
    let own = |to: usize| (0..table.clients()).any(|client| table.is_own(client, to));
    let own: Vec<usize> = (0..table.aggregators()).map(|to| usize::from(own(to))).collect();
    let fits = |time: f64| {
        let room = (0..table.aggregators()).map(|to| {
            let left = time - way(to);
            let most = if each[to] > 0.0 { (left / each[to]).floor() } else { f64::INFINITY };
            // Saturates: an aggregator that is too far away takes none.
            let most = if left < 0.0 { 0 } else { (most as usize).saturating_add(own[to]) };
            most.min(table.parties.room[to]).min(table.clients())
        });
        let room: Vec<usize> = room.collect();
        let allowed = |client: usize, to: usize| alone(client, to) <= time - way(to);
        let enough = room.iter().sum::<usize>() >= table.clients();
        enough && matching(table.clients(), &room, allowed, alone).is_some()
    };
    let (mut low, mut high) = (0.0, 1e-6);
    while !fits(high) {
        if high > 1e18 {
            return f64::INFINITY;
        }
        (low, high) = (high, high * 4.0);
    }
    for _ in 0..HALVINGS + 2 {
        let middle = (low + high) / 2.0;
        if fits(middle) { high = middle } else { low = middle }
    }
    low
}
