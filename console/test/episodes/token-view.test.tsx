import { render } from "preact";
import { expect, test, vi } from "vitest";
import { Places, linesOf, type TextLine } from "../../src/episodes/lines";
import { coloringOf } from "../../src/episodes/scale";
import { runsOf } from "../../src/episodes/token-line";
import { stepOf, TokenView } from "../../src/episodes/token-view";
import { figuresOf } from "../../src/episodes/figures";
import { drawn } from "./fixture";

const table = drawn([
  [-1, 0, false, ["ask", " me", "\n"]],
  [0, 3, true, ["well", " then", "\n", "yes"]],
  [1, 4, false, ["more"]],
  [2, 1, true, ["no"]],
]);
const sections = table.nodes.map((node) => ({ indent: 0, segments: [{ node: node.index, from: node.start, to: node.start + node.tokens }] }));

test("tokens of one color that stand together are one run of text", () => {
  const line = linesOf(["a", "b", "c"], [{ indent: 0, segments: [{ node: 0, from: 0, to: 3 }] }], 40)[1] as TextLine;
  expect(runsOf(line, (token) => (token < 2 ? "s1" : "s2"))).toEqual([
    { cls: "s1", text: "ab", piece: 0 },
    { cls: "s2", text: "c", piece: 2 },
  ]);
});

test("brackets lead to the first token of the next turn and into the turn before", () => {
  const places = new Places(linesOf(table.texts, sections, 40));
  const turnOf = (token: number) => (table.nodes[table.nodeOf[token]!]!.sampled ? table.nodeOf[token]! : -1);
  const press = (key: string, here: number) => stepOf({ key, ctrlKey: false }, { places, here, page: 5, begun: true, turnOf, marked: () => "" });
  expect([press("]", 0), press("]", 4), press("[", 8), press("]", 8)]).toEqual([3, 8, 6, 8]);
  expect(press("x", 0)).toBeNull();
});

test("a view of many tokens has elements for those in sight alone", async () => {
  const long = drawn([[-1, 0, true, Array.from({ length: 20_000 }, (_, i) => ` word${i}`)]]);
  const box = document.createElement("div");
  document.body.append(box);
  const point = vi.fn();
  render(
    <TokenView
      label="Tokens"
      table={long}
      sections={[{ indent: 0, segments: [{ node: 0, from: 0, to: 20_000 }] }]}
      coloring={coloringOf(long, "version")}
      head={() => "turn"}
      current={-1}
      point={point}
    />,
    box,
  );
  await vi.waitUntil(() => box.querySelector(".token-line"));
  expect(box.querySelectorAll("*").length).toBeLessThan(1_000);
  const view = box.querySelector<HTMLElement>("[role=application]")!;
  view.dispatchEvent(new KeyboardEvent("keydown", { key: "End", bubbles: true }));
  expect(point).toHaveBeenCalledWith(19_999, "keyboard");
  render(null, box);
});

test("a token's figures say its probability, and a prompt token has none", () => {
  const value = (token: number, name: string) => figuresOf(table, token).find((figure) => figure.name === name);
  expect(value(5, "log-probability")).toEqual({ name: "log-probability", value: "-0.5", words: "probability 0.607" });
  expect(value(5, "position")!.value).toBe("5");
  expect(value(0, "log-probability")).toBeUndefined();
});
