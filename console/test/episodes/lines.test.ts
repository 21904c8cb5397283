import { expect, test } from "vitest";
import { linesOf, Places, shown, widthOf, type Line } from "../../src/episodes/lines";

const whole = (texts: string[]) => [{ segments: [{ node: 0, from: 0, to: texts.length }], indent: 0 }];
const said = (lines: Line[]) => lines.map((line) => (line.kind === "head" ? "#" : line.pieces.map((p) => p.text).join("|")));

test("lines break at new lines, which are shown, and at the width", () => {
  const texts = ["one", " two", "\n", "\n\n", "three four", " five"];
  expect(said(linesOf(texts, whole(texts), 16))).toEqual(["#", "one| two|↵", "↵", "↵", "three four| five"]);
});

test("a word of several tokens goes to the next line whole", () => {
  const texts = ["some", " words", " un", "believ", "able"];
  expect(said(linesOf(texts, whole(texts), 18))).toEqual(["#", "some| words", " un|believ|able"]);
});

test("no line is wider than asked, and every token is on one", () => {
  const texts = ["x".repeat(100), "", "漢字".repeat(20), "\t", "ab"];
  const lines = linesOf(texts, whole(texts), 20);
  for (const line of lines) {
    if (line.kind === "text") expect(line.pieces.reduce((sum, piece) => sum + widthOf(piece.text), 0)).toBeLessThanOrEqual(20);
  }
  const places = new Places(lines);
  for (let token = 0; token < texts.length; token++) expect(places.line(token)).toBeGreaterThan(0);
});

test("text without a picture gets one", () => {
  expect(["", "\t", "\u001b[0m", "é"].map(shown)).toEqual(["·", "⇥ ", "␛[0m", "é"]);
});

test("hidden tokens are on no line", () => {
  const texts = ["<|im_start|>", "user", "\n", "hello"];
  const lines = linesOf(texts, [{ ...whole(texts)[0]!, hidden: (token: number) => token < 3 }], 40);
  expect(said(lines)).toEqual(["#", "hello"]);
  expect(new Places(lines).line(1)).toBe(-1);
});

test("the arrows go from token to token and to the nearest column, over headings", () => {
  const texts = ["aa", "bb\n", "c", "d", "eeee"];
  const sections = [
    { segments: [{ node: 0, from: 0, to: 2 }], indent: 0 },
    { segments: [{ node: 1, from: 2, to: 5 }], indent: 0 },
  ];
  const places = new Places(linesOf(texts, sections, 40));
  expect(places.step(0, 1)).toBe(1);
  expect(places.step(4, 5)).toBe(4);
  expect(places.vertical(1, 1)).toBe(4);
  expect(places.vertical(4, -1)).toBe(1);
  expect(places.vertical(4, 1)).toBe(4);
  expect(places.find(0, 1, (token) => token > 2)).toBe(3);
});

test("characters that turn or hide text are marks, and the joiners of emoji stay", () => {
  expect(shown("a\u202eb\u200b")).toBe("a⟨U+202E⟩b⟨U+200B⟩");
  expect(shown("\u{e0041}")).toBe("⟨U+E0041⟩");
  expect(shown("👩\u200d🔬 é")).toBe("👩\u200d🔬 é");
});
