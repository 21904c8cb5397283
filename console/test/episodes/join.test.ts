import { expect, test } from "vitest";
import { joined } from "../../src/episodes/join";
import { maskOf, tableOf } from "../../src/episodes/table";
import { responseOf } from "./fixture";

test("what a live episode said since is put behind what is here, as if all had come at once", () => {
  const nodes: Parameters<typeof responseOf>[0] = [
    [-1, 0, false, ["<|user|>", "b"]],
    [0, 2, true, ["c"]],
    [1, 1, false, ["<|user|>"]],
    [2, 1, true, ["d", "e"]],
  ];
  const whole = responseOf(nodes, { mask: [1, 1, 0, 1, 2, 0], mask_reasons: ["", "prompt", "late"] });
  const old = responseOf(nodes.slice(0, 2));
  // The gateway counts from the first requested node, and numbers the reasons of each response from 0.
  const more = responseOf(nodes.slice(2), { ids: [103, 104, 105], control: [0], mask: [2, 1, 0], mask_reasons: ["", "late", "prompt"] });
  more.nodes.forEach((node, i) => Object.assign(node, { index: i + 2, call_id: node.sampled ? `call-${i + 2}` : "" }));
  more.logprob = [null, -0.4, -0.5];
  const found = tableOf(joined(old, more, 2));
  const wanted = tableOf(whole);
  expect({ ...found, mask: null, maskReasons: null }).toEqual({ ...wanted, mask: null, maskReasons: null });
  expect([0, 1, 2, 3, 4, 5].map((token) => maskOf(found, token))).toEqual([0, 1, 2, 3, 4, 5].map((token) => maskOf(wanted, token)));
});
