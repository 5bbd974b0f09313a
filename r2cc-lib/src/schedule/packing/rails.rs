//! The best packing of trees on rails, by linear programming.
//!
//! Primal: maximise the sum of tree weights w_t, with x_e^r the traffic of pair e on rail r: for each e the trees
//! that use it no more than the sum over r of x_e^r; for each node and rail the x of its pairs no more than its
//! bandwidth. Its dual has a price for each node and rail; a pair costs the cheapest rail's two prices, and every
//! spanning tree must cost 1 or more. The trees that matter are found by solving the dual with few of them and
//! adding the cheapest tree until it costs 1; the primal over the trees found has the same optimum.

use microlp::{ComparisonOp, OptimizationDirection, Problem, Variable};

use super::{PairRails, Tree};
use crate::schedule::fabric::Fabric;

/// More trees than any of the small fabrics needs; reaching it means a numerical circle.
const TREES_MAX: usize = 2000;
const TOLERANCE: f64 = 1e-7;
/// A rail that would carry less than this part of a pair's messages carries none.
const LEAST_PART: f64 = 1e-3;

type Edge = (usize, usize);

/// The trees, and seconds a byte. `None` if the solver fails numerically.
pub(super) fn solve(fabric: &Fabric) -> Option<(Vec<Tree>, f64)> {
    let nodes = fabric.nodes().len();
    let most = fabric.nodes().iter().flat_map(|node| &node.rails).copied().fold(0.0, f64::max);
    let capacity = |node: usize, rail: usize| fabric.nodes()[node].rails[rail] / most;
    let rails = fabric.nodes()[0].rails.len();
    let edges: Vec<Edge> = (0..nodes).flat_map(|b| (0..b).map(move |a| (a, b))).collect();
    let shared = |(a, b): Edge| (0..rails).filter(move |&r| capacity(a, r) > 0.0 && capacity(b, r) > 0.0);

    let mut dual = Problem::new(OptimizationDirection::Minimize);
    let prices: Vec<Vec<Variable>> = (0..nodes)
        .map(|node| (0..rails).map(|rail| dual.add_var(capacity(node, rail), (0.0, f64::INFINITY))).collect())
        .collect();
    let costs: Vec<Variable> = edges.iter().map(|_| dual.add_var(0.0, (0.0, f64::INFINITY))).collect();
    for (&(a, b), &cost) in edges.iter().zip(&costs) {
        for rail in shared((a, b)) {
            let terms = [(cost, 1.0), (prices[a][rail], -1.0), (prices[b][rail], -1.0)];
            dual.add_constraint(terms, ComparisonOp::Le, 0.0);
        }
    }
    let mut trees: Vec<Vec<usize>> = Vec::new();
    // Stars first: where they are as good as any, few others are needed.
    let mut next: Vec<Vec<usize>> = (0..nodes)
        .map(|root| (0..edges.len()).filter(|&e| edges[e].0 == root || edges[e].1 == root).collect())
        .collect();
    loop {
        for tree in next.drain(..) {
            let terms: Vec<(Variable, f64)> = tree.iter().map(|&edge| (costs[edge], 1.0)).collect();
            dual.add_constraint(&terms, ComparisonOp::Ge, 1.0);
            trees.push(tree);
        }
        let solution = dual.solve().ok()?.into_solution().ok()?;
        let cost = |edge: usize| solution.var_value(costs[edge]);
        let tree = cheapest_tree(nodes, &edges, cost);
        if tree.iter().map(|&edge| cost(edge)).sum::<f64>() >= 1.0 - TOLERANCE {
            break;
        }
        if trees.len() >= TREES_MAX || trees.contains(&tree) {
            return None;
        }
        next.push(tree);
    }

    let mut primal = Problem::new(OptimizationDirection::Maximize);
    let weights: Vec<Variable> = trees.iter().map(|_| primal.add_var(1.0, (0.0, f64::INFINITY))).collect();
    let mut loads = vec![vec![Vec::new(); rails]; nodes];
    for (e, &(a, b)) in edges.iter().enumerate() {
        let using = trees.iter().zip(&weights).filter(|(tree, _)| tree.contains(&e));
        let mut terms: Vec<(Variable, f64)> = using.map(|(_, &weight)| (weight, 1.0)).collect();
        for rail in shared((a, b)) {
            let traffic = primal.add_var(0.0, (0.0, f64::INFINITY));
            terms.push((traffic, -1.0));
            loads[a][rail].push((traffic, 1.0));
            loads[b][rail].push((traffic, 1.0));
        }
        primal.add_constraint(&terms, ComparisonOp::Le, 0.0);
    }
    for (node, loads) in loads.iter().enumerate() {
        for (rail, terms) in loads.iter().enumerate().filter(|(_, terms)| !terms.is_empty()) {
            primal.add_constraint(terms, ComparisonOp::Le, capacity(node, rail));
        }
    }
    let solution = primal.solve().ok()?.into_solution().ok()?;
    let rate = solution.objective();
    if !rate.is_finite() || rate <= 0.0 {
        return None;
    }
    let mut packed: Vec<Tree> = Vec::new();
    for (tree, &weight) in trees.iter().zip(&weights) {
        let weight = solution.var_value(weight) / rate;
        if weight > TOLERANCE {
            let pairs: Vec<Edge> = tree.iter().map(|&edge| edges[edge]).collect();
            packed.push(rooted(nodes, &pairs, weight));
        }
    }
    let sum: f64 = packed.iter().map(|tree| tree.weight).sum();
    packed.iter_mut().for_each(|tree| tree.weight /= sum);
    Some((packed, 1.0 / (rate * most)))
}

/// Seconds a byte for trees that are given, and the rails of each node's messages to another: the same linear
/// program with the weights fixed and each direction by itself. A vertex of it has few entries; where it leaves each
/// NIC direction to one pair of nodes, nobody's flows get into each other's way.
pub(super) fn assign(fabric: &Fabric, trees: &[Tree]) -> Option<(f64, Vec<PairRails>)> {
    let nodes = fabric.nodes();
    let most = nodes.iter().flat_map(|node| &node.rails).copied().fold(0.0, f64::max);
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let seconds = problem.add_var(1.0, (0.0, f64::INFINITY));
    let rails = nodes[0].rails.len();
    // Loads of each node and rail, outwards and inwards.
    let mut loads = vec![vec![[Vec::new(), Vec::new()]; rails]; nodes.len()];
    let mut traffic = Vec::new();
    for (from, to) in (0..nodes.len()).flat_map(|a| (0..nodes.len()).map(move |b| (a, b))).filter(|(a, b)| a != b) {
        let uses = |tree: &&Tree| tree.parent[from] == to || tree.parent[to] == from;
        let load: f64 = trees.iter().filter(uses).map(|tree| tree.weight).sum();
        if load <= TOLERANCE {
            continue;
        }
        let mut parts = Vec::new();
        for rail in (0..rails).filter(|&r| nodes[from].rails[r] > 0.0 && nodes[to].rails[r] > 0.0) {
            let part = problem.add_var(0.0, (0.0, f64::INFINITY));
            loads[from][rail][0].push((part, 1.0));
            loads[to][rail][1].push((part, 1.0));
            parts.push((rail, part));
        }
        let terms: Vec<(Variable, f64)> = parts.iter().map(|&(_, part)| (part, 1.0)).collect();
        problem.add_constraint(&terms, ComparisonOp::Ge, load);
        traffic.push((from, to, load, parts));
    }
    for (node, loads) in nodes.iter().zip(loads) {
        for (rail, directions) in loads.into_iter().enumerate() {
            for mut terms in directions.into_iter().filter(|terms| !terms.is_empty()) {
                terms.push((seconds, -node.rails[rail] / most));
                problem.add_constraint(&terms, ComparisonOp::Le, 0.0);
            }
        }
    }
    let solution = problem.solve().ok()?.into_solution().ok()?;
    let pair = |(from, to, load, on_rails): (usize, usize, f64, Vec<(usize, Variable)>)| {
        let mut parts = vec![0.0; rails];
        for (rail, part) in on_rails {
            let part = solution.var_value(part);
            parts[rail] = if part > load * LEAST_PART { part } else { 0.0 };
        }
        let sum: f64 = parts.iter().sum();
        parts.iter_mut().for_each(|part| *part /= sum);
        PairRails { from, to, parts }
    };
    Some((solution.objective() / most, traffic.into_iter().map(pair).collect()))
}

/// Kruskal's; of equal edges the first. Returns indices of edges, ascending.
fn cheapest_tree(nodes: usize, edges: &[Edge], cost: impl Fn(usize) -> f64) -> Vec<usize> {
    let mut by_cost: Vec<usize> = (0..edges.len()).collect();
    by_cost.sort_by(|&a, &b| cost(a).total_cmp(&cost(b)));
    let mut part: Vec<usize> = (0..nodes).collect();
    let mut tree = Vec::new();
    for edge in by_cost {
        let (a, b) = edges[edge];
        let (from, to) = (part[a], part[b]);
        if from != to {
            part.iter_mut().filter(|p| **p == from).for_each(|p| *p = to);
            tree.push(edge);
        }
    }
    tree.sort_unstable();
    tree
}

/// The tree with the root that makes it least deep.
fn rooted(nodes: usize, edges: &[Edge], weight: f64) -> Tree {
    let from = |root: usize| {
        let mut parent = vec![usize::MAX; nodes];
        parent[root] = root;
        let (mut level, mut depth) = (vec![root], 0);
        while !level.is_empty() {
            let mut next = Vec::new();
            for &(a, b) in edges {
                for (up, down) in [(a, b), (b, a)] {
                    if level.contains(&up) && parent[down] == usize::MAX {
                        parent[down] = up;
                        next.push(down);
                    }
                }
            }
            depth += 1;
            level = next;
        }
        (depth, Tree { root, parent, weight })
    };
    // A packing is for two nodes or more.
    let rest = (1..nodes).map(from);
    rest.fold(from(0), |best, tree| if tree.0 < best.0 { tree } else { best }).1
}
