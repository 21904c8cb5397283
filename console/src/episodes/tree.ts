/** The token tree: paths from the root to a leaf, and a drawing of the branches. Pure. */

import type { TokenNode } from "./table";

/** Tokens [from, to) of one node, as a path has them. */
export interface Segment {
  /** Place in the list of nodes. */
  node: number;
  from: number;
  to: number;
}

/** The nodes at which a path ends: no other node continues all of them. */
export function leavesOf(nodes: readonly TokenNode[]): number[] {
  const continued = new Set(nodes.filter((node) => node.parent >= 0 && node.at === nodes[node.parent]!.tokens).map((n) => n.parent));
  return nodes.filter((node) => !continued.has(node.index)).map((node) => node.index);
}

/** The end of the longest path, the later one of equals: the conversation that is shown first. -1: there is none. */
export function longestOf(nodes: readonly TokenNode[]): number {
  const depths = depthsOf(nodes);
  const end = (node: number) => depths[node]! + nodes[node]!.tokens;
  return leavesOf(nodes).reduce((found, leaf) => (found < 0 || end(leaf) >= end(found) ? leaf : found), -1);
}

/** The tokens that lead from the root to the end of a node, in order. */
export function pathTo(nodes: readonly TokenNode[], leaf: number): Segment[] {
  const path: Segment[] = [];
  let at = nodes[leaf]?.tokens ?? 0;
  for (let place = leaf; place >= 0 && nodes[place]; place = nodes[place]!.parent) {
    const node = nodes[place]!;
    if (at > 0) path.push({ node: place, from: node.start, to: node.start + at });
    at = node.at;
  }
  return path.reverse();
}

/** Tokens before a node on its path. */
export function depthsOf(nodes: readonly TokenNode[]): number[] {
  const depths: number[] = [];
  for (const node of nodes) depths.push(node.parent < 0 ? 0 : depths[node.parent]! + node.at);
  return depths;
}

/** All tokens, node by node: a branch follows what it left, and is indented beneath it. */
export interface Branch {
  node: number;
  indent: number;
}

export function branchesOf(nodes: readonly TokenNode[]): Branch[] {
  const children = childrenOf(nodes);
  const reach = reachOf(nodes);
  const found: Branch[] = [];
  const stack: Branch[] = (children.get(-1) ?? []).map((node) => ({ node, indent: 0 })).reverse();
  while (stack.length) {
    const here = stack.pop()!;
    found.push(here);
    const next = children.get(here.node) ?? [];
    const line = next.length ? straightOn(reach, nodes, here.node, next) : -1;
    // The way straight on comes last, so that short branches are next to where they leave.
    if (line >= 0) stack.push({ node: line, indent: here.indent });
    for (const node of next.filter((n) => n !== line).reverse()) stack.push({ node, indent: here.indent + 1 });
  }
  return found;
}

/** The child that goes on with all of a node's tokens; where several do, the one whose way leads furthest, the later one of equals. */
function straightOn(reach: readonly number[], nodes: readonly TokenNode[], parent: number, children: readonly number[]): number {
  let found = -1;
  for (const child of children) {
    if (nodes[child]!.at === nodes[parent]!.tokens && (found < 0 || reach[child]! >= reach[found]!)) found = child;
  }
  return found;
}

/** Tokens from the root to the end of the longest path through each node. */
function reachOf(nodes: readonly TokenNode[]): number[] {
  const depths = depthsOf(nodes);
  const reach = nodes.map((node) => depths[node.index]! + node.tokens);
  for (let i = nodes.length - 1; i >= 0; i--) {
    const parent = nodes[i]!.parent;
    if (parent >= 0) reach[parent] = Math.max(reach[parent]!, reach[i]!);
  }
  return reach;
}

function childrenOf(nodes: readonly TokenNode[]): Map<number, number[]> {
  const children = new Map<number, number[]>();
  for (const node of nodes) children.set(node.parent, [...(children.get(node.parent) ?? []), node.index]);
  return children;
}

/** A node as a bar: `lane` from the left, `from` and `to` in tokens from the root; `fork`: where it leaves its parent. */
export interface Bar {
  node: number;
  lane: number;
  from: number;
  to: number;
  parentLane: number;
}

/** The bars of a drawing. The way straight on keeps its lane; a branch gets the first lane that is free from where it begins. */
export function barsOf(nodes: readonly TokenNode[]): Bar[] {
  const depths = depthsOf(nodes);
  const children = childrenOf(nodes);
  const reach = reachOf(nodes);
  const next = (node: number) => straightOn(reach, nodes, node, children.get(node) ?? []);
  const lanes: number[] = [];
  const ends: number[] = [];
  return nodes.map((node) => {
    const from = depths[node.index]!;
    const parentLane = node.parent < 0 ? -1 : lanes[node.parent]!;
    const straight = node.parent >= 0 && next(node.parent) === node.index;
    let lane = straight ? parentLane : ends.findIndex((end, i) => end <= from && i !== parentLane);
    if (lane < 0) lane = ends.length;
    ends[lane] = Math.max(ends[lane] ?? 0, endOf(nodes, depths, next, node.index));
    lanes.push(lane);
    return { node: node.index, lane, from, to: from + node.tokens, parentLane };
  });
}

/** The end, in tokens from the root, of the way straight on from a node. */
function endOf(nodes: readonly TokenNode[], depths: readonly number[], next: (node: number) => number, node: number): number {
  let here = node;
  for (let on = next(here); on >= 0; on = next(here)) here = on;
  return depths[here]! + nodes[here]!.tokens;
}
