import { expect, test } from "vitest";
import { chosen, linesWith, shownValue } from "../src/run/files";

const settings = [
  { name: "optimizer.lr", value: 1e-6, default: null, changed: true },
  { name: "report.trackers", value: ["tensorboard"], default: ["tensorboard"], changed: false },
  { name: "run.name", value: null, default: null, changed: false },
];

test("settings at their defaults are shown if wanted; the text may be of the name or the value", () => {
  const names = (text: string, all: boolean) => chosen(settings, text, all).map((one) => one.name);
  expect(names("", false)).toEqual(["optimizer.lr"]);
  expect(names("TensorBoard", true)).toEqual(["report.trackers"]);
  expect(names("run", true)).toEqual(["run.name"]);
});

test("values are as in a file, and what turns the direction of text is a mark", () => {
  expect([null, true, ["a", 1], "a\u202eb"].map(shownValue)).toEqual(["none", "true", '["a",1]', "a⟨U+202E⟩b"]);
});

test("lines of a log are chosen whatever their case", () => {
  expect(linesWith("one\nTwo\ntwo more\n", "TWO")).toEqual(["Two", "two more"]);
  expect(linesWith("one\n\nTwo\n", "")).toEqual(["one", "", "Two"]);
});
