//! The ledger of a meter's grants: by node, by their end, and in sum.

use std::collections::{BTreeMap, BTreeSet};

use super::super::call::NodeId;
use super::grants::NodeGrant;

/// The grants and wants of all nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GrantLedger {
    /// Units granted in the present cell, and in earlier ones.
    pub(super) present: u64,
    pub(super) earlier: u64,
    /// Units that nodes want as their grants.
    pub(super) wants: u64,
    by_node: BTreeMap<NodeId, NodeGrant>,
    by_end: BTreeSet<(u64, NodeId)>,
}

impl GrantLedger {
    /// Returns all granted units.
    pub(super) fn units(&self) -> u64 {
        self.present + self.earlier
    }

    /// Returns the number of nodes that have or want a grant.
    pub(super) fn nodes(&self) -> usize {
        self.by_node.len()
    }

    pub(super) fn get(&self, node: NodeId) -> Option<NodeGrant> {
        self.by_node.get(&node).copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeId, NodeGrant)> + '_ {
        self.by_node.iter().map(|(node, node_grant)| (*node, *node_grant))
    }

    /// Returns the nodes by the end of their grants, the first end first.
    pub(super) fn by_end(&self) -> impl DoubleEndedIterator<Item = (u64, NodeId)> + '_ {
        self.by_end.iter().copied()
    }

    /// Moves on to another cell.
    pub(super) fn turn(&mut self) {
        (self.present, self.earlier) = (0, self.units());
    }

    /// Adds the record of a node, while `cell` is the present cell.
    pub(super) fn hold(&mut self, node: NodeId, node_grant: NodeGrant, cell: u64) {
        if node_grant.amount == 0 && node_grant.want == 0 {
            return;
        }
        self.wants += node_grant.want;
        if node_grant.cell == cell {
            self.present += node_grant.amount;
        } else {
            self.earlier += node_grant.amount;
        }
        self.by_node.insert(node, node_grant);
        self.by_end.insert((node_grant.until_us, node));
    }

    /// Removes and returns the record of a node, while `cell` is the present cell.
    pub(super) fn release(&mut self, node: NodeId, cell: u64) -> Option<NodeGrant> {
        let node_grant = self.by_node.remove(&node)?;
        self.by_end.remove(&(node_grant.until_us, node));
        self.wants -= node_grant.want;
        let (own, other) = if node_grant.cell == cell {
            (&mut self.present, &mut self.earlier)
        } else {
            (&mut self.earlier, &mut self.present)
        };
        // After a change of the limit, the number of a cell may mean another cell. The sum is right
        // all the same.
        let rest = node_grant.amount.saturating_sub(*own);
        *own -= node_grant.amount - rest;
        *other = other.saturating_sub(rest);
        Some(node_grant)
    }

    /// Lets the grant of a node end at `until_us`.
    pub(super) fn end_at(&mut self, node: NodeId, until_us: u64) {
        if let Some(node_grant) = self.by_node.get_mut(&node) {
            self.by_end.remove(&(node_grant.until_us, node));
            self.by_end.insert((until_us, node));
            node_grant.until_us = until_us;
        }
    }
}
