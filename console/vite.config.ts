import { defineConfig } from "vitest/config";

// The gateway refuses requests whose Origin differs from their Host, as foreign pages send them: the proxy keeps the Host.
const gateway = { target: "http://127.0.0.1:8000", changeOrigin: false };

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
  server: { proxy: { "/admin": gateway, "/metrics": gateway } },
  test: { environment: "happy-dom", isolate: false, include: ["test/**/*.test.{ts,tsx}"] },
});
