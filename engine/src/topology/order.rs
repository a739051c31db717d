//! In which order hosts stand in a ring or chain, so that it takes the least time.
//!
//! The slowest link counts, and the way of a chunk over all links is added: a bottleneck travelling salesman
//! with a little of the usual one. Up to [`limits::EXACT_ORDER`] hosts all orders are tried, leaving out what is
//! slower than the best so far. Beyond that, orders that go on to the nearest host are improved: a part is
//! turned around (2-opt; G. A. Croes, 1958) or moved elsewhere (Or-opt; I. Or, 1976), until nothing helps.

use super::Shape;
use super::cost::Network;
use crate::limits;

/// What each step from a host to another costs.
struct Steps {
    shape: Shape,
    hosts: usize,
    /// Seconds of the step if it is the slowest, and seconds that it adds to the way; by from and to.
    costs: Vec<(f64, f64)>,
    /// Seconds of each host's cores at an end of a chain, and elsewhere.
    busy: Vec<(f64, f64)>,
}

/// An order's worth: its seconds, and the sum over all its steps, which tells apart those that are alike.
type Worth = (f64, f64);

impl Steps {
    fn new(network: &Network, shape: Shape, hosts: &[usize]) -> Steps {
        let mut costs = Vec::with_capacity(hosts.len() * hosts.len());
        for &from in hosts {
            for &to in hosts {
                costs.push(match shape {
                    _ if from == to => (f64::INFINITY, f64::INFINITY),
                    Shape::Ring => network.ring_step(from, to, hosts.len()),
                    Shape::Chain => network.chain_step(from, to),
                });
            }
        }
        let busy = hosts.iter().map(|&host| match shape {
            Shape::Ring => {
                let bytes = network.ring_bytes(hosts.len());
                (0.0, network.working_s(host, bytes, bytes))
            }
            Shape::Chain => network.chain_work_s(host),
        });
        Steps { shape, hosts: hosts.len(), costs, busy: busy.collect() }
    }

    fn cost(&self, from: usize, to: usize) -> (f64, f64) {
        self.costs[from * self.hosts + to]
    }

    fn worth(&self, order: &[usize]) -> Worth {
        let next = match self.shape {
            Shape::Ring => order.len(),
            Shape::Chain => order.len().saturating_sub(1),
        };
        let (mut slowest, mut way, mut sum) = (0.0_f64, 0.0, 0.0);
        for place in 0..next {
            let (alone, hop) = self.cost(order[place], order[(place + 1) % order.len()]);
            slowest = slowest.max(alone);
            way += hop;
            // Steps that cannot be are counted, so that an order with fewer of them is better.
            sum += alone.min(1e12);
        }
        for (place, &host) in order.iter().enumerate() {
            let is_end = self.shape == Shape::Chain && (place == 0 || place + 1 == order.len());
            slowest = slowest.max(if is_end { self.busy[host].0 } else { self.busy[host].1 });
        }
        (slowest + way, sum)
    }

    /// The best order, beginning with `best`.
    fn exact(&self, best: Vec<usize>) -> Vec<usize> {
        let mut search = Search { steps: self, worth: self.worth(&best).0, best };
        let mut free: Vec<usize> = (0..self.hosts).collect();
        let firsts = if self.shape == Shape::Ring { 1 } else { self.hosts };
        for first in 0..firsts {
            free.retain(|&host| host != first);
            search.extend(&mut vec![first], &mut free, 0.0, 0.0);
            free.push(first);
        }
        search.best
    }

    /// From `first` always on to the nearest.
    fn nearest(&self, first: usize) -> Vec<usize> {
        let mut order = vec![first];
        let mut free: Vec<usize> = (0..self.hosts).filter(|&host| host != first).collect();
        while let Some(&last) = order.last() {
            let cost = |host: usize| self.cost(last, host);
            let near = free.iter().enumerate();
            let near = near.min_by(|a, b| cost(*a.1).partial_cmp(&cost(*b.1)).expect("no NaN"));
            let Some((index, _)) = near else { break };
            order.push(free.swap_remove(index));
        }
        order
    }

    /// Turns and moves parts until nothing helps, or `tries` are used up.
    fn improve(&self, mut order: Vec<usize>, tries: &mut usize) -> Vec<usize> {
        while self.change(&mut order, tries) {}
        order
    }

    /// Makes the first change that helps, if there is one.
    fn change(&self, order: &mut [usize], tries: &mut usize) -> bool {
        let (hosts, worth) = (order.len(), self.worth(order));
        let mut helps = |order: &[usize]| {
            *tries = tries.saturating_sub(1);
            *tries > 0 && is_less(self.worth(order), worth)
        };
        for from in 0..hosts {
            for end in from + 2..=hosts {
                order[from..end].reverse();
                if helps(order) {
                    return true;
                }
                order[from..end].reverse();
                // A part of up to three hosts goes behind what follows it, and the other way.
                let most = 3.min(end - from - 1);
                for length in 1..=most {
                    order[from..end].rotate_left(length);
                    if helps(order) {
                        return true;
                    }
                    order[from..end].rotate_right(length);
                    order[from..end].rotate_right(length);
                    if helps(order) {
                        return true;
                    }
                    order[from..end].rotate_left(length);
                }
            }
        }
        false
    }
}

/// Orders that are improved.
const STARTS: usize = 8;

/// Changes that are tried in all, so that 64 hosts take less than a second.
const TRIES: usize = 1 << 20;

/// Seconds that differ by rounding only are the same.
fn is_less(a: Worth, b: Worth) -> bool {
    let same = a.0 == b.0 || (a.0 - b.0).abs() <= 1e-12 * b.0.abs();
    if same { a.1 < b.1 * (1.0 - 1e-12) } else { a.0 < b.0 }
}

struct Search<'a> {
    steps: &'a Steps,
    best: Vec<usize>,
    worth: f64,
}

impl Search<'_> {
    fn extend(&mut self, order: &mut Vec<usize>, free: &mut Vec<usize>, slowest: f64, way: f64) {
        let last = order[order.len() - 1];
        if free.is_empty() {
            let worth = self.steps.worth(order).0;
            if worth < self.worth {
                (self.worth, self.best) = (worth, order.clone());
            }
            return;
        }
        for index in 0..free.len() {
            let next = free[index];
            let (alone, hop) = self.steps.cost(last, next);
            let (slowest, way) = (slowest.max(alone), way + hop);
            if slowest + way >= self.worth {
                continue;
            }
            free.swap_remove(index);
            order.push(next);
            self.extend(order, free, slowest, way);
            order.pop();
            free.push(next);
            let end = free.len() - 1;
            free.swap(index, end);
        }
    }
}

/// The best order that is found of `hosts`, which are given as they would stand without a plan. It is proven to
/// be the best one if `exact`.
pub(super) fn best(network: &Network, shape: Shape, hosts: &[usize], exact: bool) -> Vec<usize> {
    let steps = Steps::new(network, shape, hosts);
    let mut best: Vec<usize> = (0..hosts.len()).collect();
    let mut starts: Vec<Vec<usize>> = vec![best.clone()];
    starts.extend((0..hosts.len()).map(|first| steps.nearest(first)));
    starts.sort_by(|a, b| steps.worth(a).partial_cmp(&steps.worth(b)).expect("no NaN"));
    let mut tries = TRIES;
    for start in starts.into_iter().take(STARTS) {
        let order = steps.improve(start, &mut tries);
        if is_less(steps.worth(&order), steps.worth(&best)) {
            best = order;
        }
    }
    if exact && hosts.len() <= limits::EXACT_ORDER {
        best = steps.exact(best);
    }
    best.into_iter().map(|place| hosts[place]).collect()
}

/// What no order can be faster than: the slowest step that it must have, and the shortest way.
pub(super) fn lower_bound(network: &Network, shape: Shape, hosts: &[usize]) -> f64 {
    let steps = Steps::new(network, shape, hosts);
    let after = steps.nearest_steps(|a, b| steps.cost(a, b));
    let before = steps.nearest_steps(|a, b| steps.cost(b, a));
    let slowest = after.0.max(before.0).max(steps.least_that_joins()).max(steps.least_of_two());
    let busy = steps.busy.iter().map(|&(at_end, between)| match shape {
        Shape::Ring => between,
        Shape::Chain => at_end,
    });
    busy.fold(slowest, f64::max) + after.1.max(before.1)
}

impl Steps {
    /// The slowest and the sum of the nearest steps of all hosts; one end of a chain has none.
    fn nearest_steps(&self, cost: impl Fn(usize, usize) -> (f64, f64)) -> (f64, f64) {
        let nearest = |a: usize, part: &dyn Fn((f64, f64)) -> f64| {
            let others = (0..self.hosts).filter(|&b| b != a);
            others.map(|b| part(cost(a, b))).fold(f64::INFINITY, f64::min)
        };
        let sorted = |part: &dyn Fn((f64, f64)) -> f64| {
            let mut all: Vec<f64> = (0..self.hosts).map(|a| nearest(a, part)).collect();
            all.sort_by(f64::total_cmp);
            all.truncate(self.hosts - usize::from(self.shape == Shape::Chain));
            all
        };
        let (alone, hop) = (sorted(&|cost| cost.0), sorted(&|cost| cost.1));
        (alone.last().copied().unwrap_or(0.0), hop.iter().sum())
    }

    /// The better direction of a pair.
    fn pair(&self, a: usize, b: usize) -> f64 {
        self.cost(a, b).0.min(self.cost(b, a).0)
    }

    /// The least time whose steps join all hosts: the longest edge of a minimum spanning tree (R. Prim, 1957).
    fn least_that_joins(&self) -> f64 {
        let mut away: Vec<f64> = (0..self.hosts).map(|host| self.pair(0, host)).collect();
        let mut left: Vec<usize> = (1..self.hosts).collect();
        let mut longest = 0.0_f64;
        while let Some(next) =
            (0..left.len()).min_by(|&a, &b| away[left[a]].total_cmp(&away[left[b]]))
        {
            let host = left.swap_remove(next);
            longest = longest.max(away[host]);
            left.iter().for_each(|&other| away[other] = away[other].min(self.pair(host, other)));
        }
        longest
    }

    /// The least time in which hosts have two neighbours, but for the two ends of a chain.
    fn least_of_two(&self) -> f64 {
        let second = |a: usize| {
            let mut pairs: Vec<f64> =
                (0..self.hosts).filter(|&b| b != a).map(|b| self.pair(a, b)).collect();
            pairs.sort_by(f64::total_cmp);
            pairs.get(1).copied().unwrap_or(0.0)
        };
        let mut all: Vec<f64> = (0..self.hosts).map(second).collect();
        all.sort_by(|a, b| b.total_cmp(a));
        let ends = if self.shape == Shape::Chain { 2 } else { 0 };
        all.get(ends).copied().unwrap_or(0.0)
    }
}
