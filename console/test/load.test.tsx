import { render } from "preact";
import { act } from "preact/test-utils";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { ApiError } from "../src/api";
import { useLoaded } from "../src/load";

beforeEach(() => {
  vi.useFakeTimers();
  document.body.innerHTML = '<div id="place"></div>';
});
afterEach(() => {
  act(() => render(null, document.getElementById("place")!));
  vi.useRealTimers();
});

async function shown(ask: (signal: AbortSignal) => Promise<string>, everyMs: number, afterMs: number): Promise<string> {
  const place = document.getElementById("place")!;
  function View() {
    const { value, error } = useLoaded(ask, [], everyMs);
    return <p>{error.value ?? value.value ?? "loading"}</p>;
  }
  act(() => render(<View />, place));
  await act(async () => void (await vi.advanceTimersByTimeAsync(afterMs)));
  return place.textContent;
}

test("a view that asks once asks again after a failure that may pass, and not after a refusal", async () => {
  const unreached = vi.fn().mockRejectedValueOnce(new TypeError("Failed to fetch")).mockResolvedValue("here");
  expect(await shown(unreached, 0, 5_000)).toBe("here");
  const refused = vi.fn().mockRejectedValue(new ApiError("no model", 404, "no_model"));
  document.body.innerHTML = '<div id="place"></div>';
  expect(await shown(refused, 0, 60_000)).toBe("no model");
  expect(refused).toHaveBeenCalledTimes(1);
});

test("a request that is never answered does not keep a view from asking again", async () => {
  const hangs = (signal: AbortSignal) => new Promise<string>((_, fail) => signal.addEventListener("abort", () => fail(signal.reason)));
  const ask = vi.fn().mockImplementationOnce(hangs).mockResolvedValue("here");
  expect(await shown(ask, 2_000, 70_000)).toBe("here");
});
