import { expect, test } from "vitest";
import { begun, drawn, entries, waits, type Batch, type Ledger } from "../src/staleness/ledger";

const group = (id: string, state: "reserved" | "occupied", members: Record<string, number>) => ({ group_id: id, version: 3, state, size: 4, members });
const BATCH: Batch = {
  batch: 5,
  state: "PENDING",
  occupied: 1,
  reserved: 1,
  leased: true,
  groups: [group("slow", "reserved", { open: 3, rewarded: 1, dropped: 1 }), group("done", "occupied", { rewarded: 4 })],
};
const LEDGER: Ledger = {
  late_groups: "cancel",
  eta: 2,
  batch_size: 3,
  version: 5,
  consumed: 5,
  lease: { batch: 5, consumer: "trainer", left_s: 30 },
  batches: [BATCH],
  waiting: { later: 4 },
  lost: [],
  slowest: [{ group_id: "slow", running: 3, oldest_s: 90, episodes: [] }],
};

test("places: complete groups, running ones, then free ones; dropped members count for nothing", () => {
  expect(entries(BATCH, 3).map((one) => one && [one.group.group_id, one.done, one.members])).toEqual([["done", 4, 4], ["slow", 1, 4], null]);
});

test("of a batch of a thousand places some free ones are drawn, and of many batches those that have begun", () => {
  const { shown, left } = drawn(entries(BATCH, 1024));
  expect(shown.length).toBe(14);
  expect(shown.slice(0, 3).map((one) => one?.group.group_id)).toEqual(["done", "slow", undefined]);
  expect(left).toBe("1,010 more places free");
  expect(drawn(entries(BATCH, 3)).left).toBe("");
  const empty = Array.from({ length: 64 }, () => ({ ...BATCH, groups: [] }));
  expect(begun([BATCH, ...empty]).length).toBe(3);
  expect(begun(empty).length).toBe(2);
});

test("the sentences go from the trainer to the agents, with the group that holds the rest up", () => {
  const [trainer, batch, agents] = waits(LEDGER);
  expect(trainer).toBe("trainer holds batch 5 and trains its groups as they come (lease: 30 s left).");
  expect(batch).toBe("Batch 5 waits for 1 group that runs and 1 group that has not begun; the slowest, slow, since 90 s.");
  expect(agents).toContain("1 group (4 episodes) waits for a place");
});
