import { render } from "preact";
import { act } from "preact/test-utils";
import { beforeAll, beforeEach, expect, test, vi } from "vitest";
import { press, shortcuts } from "../src/keys";
import { confirm, ConfirmDialog } from "../src/parts/confirm";
import { VirtualList } from "../src/parts/virtual-list";

let place: HTMLElement;

beforeAll(() => {
  vi.stubGlobal("ResizeObserver", class { observe() {} disconnect() {} });
});
beforeEach(() => {
  document.body.innerHTML = '<div id="place"></div>';
  place = document.getElementById("place")!;
});

const key = (name: string, on: EventTarget = document.body) => {
  const event = new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true });
  on.dispatchEvent(event);
  return event;
};

test("a list of 100,000 rows has those in sight alone, and its whole length for the scroll bar and for screen readers", () => {
  const seen = vi.fn();
  act(() => render(<VirtualList label="Episodes" length={100_000} rowHeight={30} row={(i) => <span role="gridcell">{i}</span>} seen={seen} />, place));
  const grid = place.querySelector('[role="grid"]')!;
  expect(grid.getAttribute("aria-rowcount")).toBe("100000");
  expect((place.querySelector(".virtual-space") as HTMLElement).style.height).toBe("3000000px");
  expect(place.querySelectorAll('[role="row"]').length).toBeLessThan(60);
  expect(seen).toHaveBeenCalled();
});

test("the arrow keys choose a row and stay within the list; Enter opens it", () => {
  let chosen = 0;
  const open = vi.fn();
  const show = () =>
    act(() => render(<VirtualList label="l" length={3} rowHeight={30} row={(i) => <span role="gridcell">{i}</span>} chosen={chosen} choose={(i) => (chosen = i)} open={open} />, place));
  show();
  for (const name of ["ArrowUp", "ArrowDown", "End", "ArrowDown", "Enter"]) {
    key(name, place.querySelector('[role="grid"]')!);
    show();
  }
  expect([chosen, open.mock.calls]).toEqual([2, [[2]]]);
});

test("two keys in a row are a shortcut; keys typed into a field are the field's", () => {
  const acted = vi.fn();
  const one = { keys: "g r", text: "Run", act: acted };
  shortcuts.add(one);
  addEventListener("keydown", press);
  const field = document.body.appendChild(document.createElement("input"));
  for (const name of ["g", "r"]) key(name, field);
  expect(acted).not.toHaveBeenCalled();
  for (const name of ["g", "r"]) key(name);
  expect(acted).toHaveBeenCalledOnce();
  removeEventListener("keydown", press);
  shortcuts.delete(one);
});

test("nothing is done before it is confirmed, and a refusal stays in the dialog in the gateway's words", async () => {
  const drain = vi.fn().mockRejectedValueOnce(new Error("it is the last engine")).mockResolvedValueOnce({});
  act(() => render(<ConfirmDialog />, place));
  act(() => confirm({ title: "Drain?", body: "12 calls go on elsewhere.", action: "Drain", act: drain }));
  expect(drain).not.toHaveBeenCalled();
  const submit = async () => {
    await act(async () => void place.querySelector("form")!.dispatchEvent(new Event("submit", { cancelable: true, bubbles: true })));
  };
  await submit();
  expect(place.querySelector('[role="alert"]')!.textContent).toBe("it is the last engine");
  await submit();
  expect(drain).toHaveBeenCalledTimes(2);
  expect(place.querySelector("form")).toBeNull();
});
