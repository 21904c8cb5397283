import { defineConfig } from "vitest/config";

// The page is served at /console/ by the gateway, maybe behind a proxy's prefix: every address in it is relative.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../gateway/console/dist",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0, // the Content-Security-Policy allows no data: address
    modulePreload: { polyfill: false },
  },
  server: { proxy: { "/admin": "http://127.0.0.1:8000", "/metrics": "http://127.0.0.1:8000" } },
  test: { environment: "happy-dom", isolate: false, include: ["test/**/*.test.{ts,tsx}"] },
});
